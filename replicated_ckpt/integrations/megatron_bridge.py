"""Megatron-Bridge: a manager for `checkpoint.custom_manager_class`. Its checkpoints survive the loss of a node.

The import of this module registers the class, so that Megatron-Bridge may construct it by its name.
"""

import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.bridge.training import checkpointing
from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    CheckpointSaveContext,
    DefaultCheckpointManager,
)
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.utils.checkpoint_utils import (
    get_checkpoint_name,
    get_checkpoint_run_config_filename,
    get_checkpoint_tracker_filename,
    get_checkpoint_train_state_filename,
)
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

from replicated_ckpt.config import Retention
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid
from replicated_ckpt.stores.files.existence import is_there

STORE = "replicated"
"""The store's directory below `checkpoint.save`."""

_FILES = "replicated_ckpt.files"
_TRAIN_STATE, _RUN_CONFIG = "train_state", "run_config"
_NEWEST = str(Newest("", "iter_{:07d}"))
_MARKER = b"This checkpoint is in ../replicated. This file tells Megatron-Bridge that its format is fsdp_dtensor.\n"
_REPLACED = ("save_fsdp_dtensor_checkpoint", "_get_filesystem_reader", "cleanup_old_non_persistent_checkpoint")

# Bridge makes only classes below allowed prefixes.
register_allowed_target_prefix(__name__)


class ReplicatedCheckpointManager(DefaultCheckpointManager):
    """Megatron-Bridge's manager, with another place for the checkpoints. Bridge's own code saves and restores.

    `checkpoint.save` is a directory on each node's own disk; the node's store is `replicated` in it. Each save also
    goes to other nodes, with the train state and the run's configuration, which Bridge writes on one node only. The
    constructor writes these two on each node, before Bridge looks for a checkpoint there. All ranks load the same
    checkpoint, whatever lies on their nodes: the newest complete one, or `ckpt_step`. With `most_recent_k`, agents
    remove checkpoints on all nodes. Bridge itself reads a `pretrained_checkpoint`.

    All ranks construct a manager, save and load together. While a manager saves or loads, it replaces functions of
    Bridge's module `checkpointing`: no other manager may save or load at that time.

    Written against Megatron-Bridge 0.6.2, and commit 067f987 of 2026-08-22.
    """

    writer_options: ClassVar[Mapping[str, Any]] = {}
    """Other arguments of ReplicatedWriter: copies, ack, ... Set it before Bridge's setup."""

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        """Writes the files that Bridge looks for on this node, if there is a checkpoint to load.

        Raises:
            ConfigInvalid: the configuration is not supported. CheckpointNotFound: there is no checkpoint of `ckpt_step`.
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader.
        """
        _refuse(checkpoint_config)
        super().__init__(checkpoint_config)
        self._directory = Path(checkpoint_config.save or checkpoint_config.load).resolve()
        if checkpoint_config.load is not None:
            self._put_small_files()

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any = None) -> None:
        """Returns when the checkpoint is committed.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedWriter.
        """
        files = _small_files(ctx) if not dist.is_initialized() or dist.get_rank() == 0 else {}

        def save_state(
            path: str | Path, state_dict: dict[str, Any], *, cfg: Any, model: Any, barrier: bool = True
        ) -> None:
            del barrier  # a save ends on all ranks together
            state = checkpointing.preprocess_fsdp_dtensor_state_dict(cfg, state_dict, model)
            self._checkpoints.save(Path(path).name, {**state, _FILES: files} if files else state)
            Path(path).mkdir(parents=True, exist_ok=True)
            # Bridge recognises the format by this file. Without it, a load would expect another format.
            _write(Path(path) / ".metadata", _MARKER)

        with _in_place_of(save_state, checkpointing._get_filesystem_reader, _drop_small_files):  # noqa: SLF001
            super().save(ctx, callback_manager)

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Restores a checkpoint. Returns its step and its number of floating-point operations.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader.
        """
        theirs = checkpointing._get_filesystem_reader  # noqa: SLF001 - there is no public way

        def make_reader(path: str, *args: Any, **kwargs: Any) -> Any:
            # A pretrained checkpoint lies in another directory, which Bridge reads itself.
            if Path(path).resolve().parent != self._directory:
                return theirs(path, *args, **kwargs)
            reader = self._checkpoints.reader
            reader.reset(Path(path).name)
            return reader

        with self._checkpoints.use_group(), _in_place_of(checkpointing.save_fsdp_dtensor_checkpoint, make_reader):
            step, operations = super().load(ctx)
        return step, operations

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Waits for nothing, because saves are synchronous. With `terminate`, closes writer and reader."""
        del state, blocking
        if terminate and "_checkpoints" in vars(self):
            self._checkpoints.close()
            del self._checkpoints

    @cached_property
    def _checkpoints(self) -> NamedCheckpoints:
        kept = self.checkpoint_config.most_recent_k
        # 0 would remove the checkpoint of the save itself.
        retention = Retention(keep_last=max(1, kept)) if kept > -1 else None
        return NamedCheckpoints(
            self._directory / STORE, {"retention": retention, **self.writer_options}, newest=_NEWEST
        )

    def _put_small_files(self) -> None:
        """Writes the small files of the newest complete checkpoint, or of `ckpt_step`, on this node."""
        latest = Path(get_checkpoint_train_state_filename(str(self._directory), prefix="latest"))
        step = self.checkpoint_config.ckpt_step
        name = _NEWEST if step is None else Path(get_checkpoint_name("", step)).name
        if self._checkpoints.find(name) is None:
            if step is not None:
                raise CheckpointNotFound(f"There is no checkpoint {name} in {self._directory}.", "Unset ckpt_step.")
            # Because of this file, Bridge would look for a checkpoint that no node has.
            if is_there(latest):
                raise ConfigInvalid(
                    f"{latest} names a checkpoint that no store has.",
                    "Give this job an empty directory. If Bridge's own manager saved the checkpoint, pass that directory "
                    "as pretrained_checkpoint.",
                )
            return
        wanted: dict[str, Any] = {_FILES: {_TRAIN_STATE: b"", _RUN_CONFIG: b""}}
        loaded = self._directory / self._checkpoints.load(name, wanted)
        loaded.mkdir(parents=True, exist_ok=True)
        train_state, run_config = wanted[_FILES][_TRAIN_STATE], wanted[_FILES][_RUN_CONFIG]
        _write(loaded / ".metadata", _MARKER)
        _write(Path(get_checkpoint_run_config_filename(str(loaded))), run_config)
        _write(Path(get_checkpoint_train_state_filename(str(loaded))), train_state)
        _write(Path(get_checkpoint_tracker_filename(str(self._directory))), loaded.name.removeprefix("iter_").encode())
        # Last: Bridge reads this file first, and then the others.
        _write(latest, train_state)


def _refuse(config: CheckpointConfig) -> None:
    # Another version of Bridge would silently save through its own storage.
    missing = [name for name in _REPLACED if not hasattr(checkpointing, name)]
    if missing:
        raise ConfigInvalid(
            f"This Megatron-Bridge has no {', '.join(missing)}, which replicated_ckpt needs to save its checkpoints.",
            "Use Megatron-Bridge 0.6.2.",
        )
    if config.ckpt_format != "fsdp_dtensor":
        raise ConfigInvalid(
            f"checkpoint.ckpt_format is {config.ckpt_format!r}, which does not save through DCP's storage.",
            "Train with Megatron-FSDP and ckpt_format: fsdp_dtensor.",
        )
    if config.async_save or config.non_persistent_ckpt_type is not None:
        raise ConfigInvalid(
            "async_save and non_persistent_ckpt_type are not supported: Bridge saves those through its own storage.",
            "Unset both.",
        )
    if config.save is None and config.load is None:
        raise ConfigInvalid("Neither checkpoint.save nor checkpoint.load is set.", "Set both to one directory.")
    if config.save is not None and config.load not in (None, config.save):
        raise ConfigInvalid(
            f"checkpoint.load is {config.load!r}, but checkpoint.save is {config.save!r}.",
            "Set both to one directory on each node's own disk; to start from another checkpoint, pass "
            "pretrained_checkpoint.",
        )


@contextlib.contextmanager
def _in_place_of(*functions: Any) -> Iterator[None]:
    """Replaces Bridge's functions named in `_REPLACED`, in that order, during a with block."""
    before = {name: getattr(checkpointing, name) for name in _REPLACED}
    for name, function in zip(_REPLACED, functions, strict=False):
        setattr(checkpointing, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(checkpointing, name, function)


def _small_files(ctx: CheckpointSaveContext) -> dict[str, bytes]:
    """The content of the files that Bridge writes only on rank 0's node."""
    train_state = ctx.state.train_state.state_dict()
    operations = torch.tensor(ctx.num_floating_point_operations_so_far, dtype=torch.float32)
    saved = io.BytesIO()
    torch.save({**train_state, "floating_point_operations_so_far": operations}, saved)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run_config.yaml"
        ctx.state.cfg.to_yaml(str(path))
        return {_TRAIN_STATE: saved.getvalue(), _RUN_CONFIG: path.read_bytes()}


def _drop_small_files(save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False, **limits: Any) -> None:
    """Removes old directories as Bridge does, but not the store's checkpoints: agents apply `most_recent_k` to those."""
    del do_async, limits
    for old in sorted(Path(save_dir).glob("iter_*"))[: -max(1, leave_ckpt_num)]:
        shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Writes a file completely or not at all, because the ranks of a node write it at the same time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
