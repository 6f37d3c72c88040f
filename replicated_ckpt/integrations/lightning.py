"""PyTorch Lightning: strategies whose checkpoints survive the loss of a node."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from replicated_ckpt.integrations import check_versions

check_versions("lightning")  # before the import, which may fail with an older version

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.reading.newest import is_newest
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.dcp.rank_state.rank_state import (
    capture_random,
    entries_of,
    restore_random,
    values_in,
    wanted_entries,
)
from replicated_ckpt.dcp.rank_state.replay import ReplayedLoader
from replicated_ckpt.dcp.runtime.user_code import warn
from replicated_ckpt.integrations.model_state import (
    AdapterPlanner,
    drop_base,
    get_saved_state,
    get_wanted_state,
    get_wanted_weights,
    set_loaded_state,
)
from replicated_ckpt.stores.files.existence import is_directory, is_there

_MODEL, _OPTIMIZER = "state_dict", "optimizer_"


class TrainLoader(ReplayedLoader):
    """The train loader of a Trainer. Lightning's loop prefetches, and may end an epoch before the loader does."""

    asks_for_more = False

    def __init__(self, loader: Iterable[Any], trainer: Any) -> None:
        super().__init__(loader)
        self._trainer = trainer

    @property
    def worker_init_fn(self) -> Any:
        """The loader's own, which Lightning sets."""
        return self.loader.worker_init_fn  # type: ignore[attr-defined]  # DataLoader's

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function  # type: ignore[attr-defined]

    def count_read_ahead(self) -> int:
        # Batches that the loop has fetched and not trained on: a resume must read them again.
        return len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))  # noqa: SLF001 - there is no public way

    def is_epoch_over(self) -> bool:
        return bool(self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch) or super().is_epoch_over()


class _Found(NamedTuple):
    """A rank's candidate for a resume. All ranks use the smallest one: the newest file on any rank's disk."""

    is_missing: bool
    age: float
    name: str
    path: str


class ReplicatedStrategy:
    """The common part of the three strategies below. Lightning decides what it saves and when, this class decides where.

    Model and optimizers are saved sharded, under the model's own names. All other parts of Lightning's checkpoint
    (loops, schedulers, callbacks, precision, data module, data loaders, hyperparameters) are saved for each rank, with
    its random generators. If as many ranks load as saved, each gets its own state. With another number of ranks, each
    gets rank 0's state and keeps its generators, and rank 0 warns.

    `ckpt_path="latest"` resumes from the newest complete checkpoint, or starts anew without one. A path of
    ModelCheckpoint means the same checkpoint on every node, whatever lies there.

    Args:
        root: this node's store, a directory on a node-local disk.
        writer_options: other arguments of ReplicatedWriter: copies, ack, object_store, ...
        trust_pickles: allow any class in the states of callbacks, hyperparameters and data modules.
        adapter_only: for a model with PEFT's adapters, a save leaves out the frozen base. False: it includes the base.
        args, kwargs: as of Lightning's strategy.
    """

    model: Any
    optimizers: Any
    lightning_module: Any
    global_rank: int
    local_rank: int

    def __init__(
        self,
        *args: Any,
        root: str | os.PathLike[str],
        writer_options: Mapping[str, Any] | None = None,
        trust_pickles: bool = False,
        adapter_only: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._root = Path(root).resolve()
        self._writer_options = dict(writer_options or {})
        self._trust_pickles = trust_pickles
        self._adapter_only = adapter_only
        self._random: dict[str, Any] | None = None
        self._restore: Callable[[], None] | None = None
        self._loaded_name = LATEST

    # Methods that Lightning calls -----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: `setup` itself restores model and callbacks at its end, before `on_fit_start`."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning loads optimizers after `on_fit_start`, in which callbacks may add parameter groups."""
        return True

    def setup_environment(self) -> None:
        """Replaces two methods of Lightning's connector.

        `_resume_alike` has ranks agree on `ckpt_path`, because each rank finds "last" and "best" on its own disk.
        `_restore_later` moves the restore to the end of `setup`: before, a model may still be on the meta device.
        """
        super().setup_environment()  # type: ignore[misc]  # Lightning's
        connector = self.lightning_module.trainer._checkpoint_connector  # noqa: SLF001 - there is no public way
        # Only once: a second fit would wrap the wrapper.
        if not isinstance(connector.resume_start, partial):
            connector.resume_start = partial(self._resume_alike, connector.resume_start)
            connector._restore_modules_and_callbacks = partial(  # noqa: SLF001 - there is no public way
                self._restore_later,
                connector._restore_modules_and_callbacks,  # noqa: SLF001
            )

    def setup(self, trainer: Any) -> None:
        """Also restores model and callbacks, before `on_fit_start`."""
        super().setup(trainer)  # type: ignore[misc]
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wraps a train loader, so that it continues in the middle of an epoch."""
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self.lightning_module.trainer
        return TrainLoader(loader, trainer) if trainer.training else loader

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Each rank's part, under the model's own names."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Each rank's part, under the model's own names."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_saved_state(self.model, plain)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Sets the model from the result of `load_checkpoint`, which `on_load_checkpoint` may have changed."""
        copied = dict(checkpoint[_MODEL])  # torch renames keys in place, and callbacks get the dictionary afterwards
        set_model_state_dict(self.model, copied, options=StateDictOptions(strict=strict))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers of the checkpoint that `load_checkpoint` has read, into their present parameter groups.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader.
        """
        del checkpoint
        state: dict[str, Any] = {
            f"{_OPTIMIZER}{index}": get_wanted_state(self.model, optimizer)
            for index, optimizer in enumerate(self.optimizers)
        }
        self._checkpoints.load(self._loaded_name, state, self._planner())
        for index, optimizer in enumerate(self.optimizers):
            set_loaded_state(self.model, optimizer, state[f"{_OPTIMIZER}{index}"])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Returns after the commit. Writes a small file with the checkpoint's name to `filepath` on each node.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedWriter. TypeError: storage_options were given.
        """
        if storage_options is not None:
            raise TypeError("storage_options of save_checkpoint belong to a CheckpointIO; pass them in writer_options.")
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        # Not in lightning_module_state_dict: callbacks that average weights replace its result.
        weights = checkpoint["state_dict"]
        saved = drop_base(self.model, weights) if self._adapter_only else weights
        state = {_MODEL: saved, **entries_of({"rest": rest, "random": capture_random()})}
        for index, optimizer_state in enumerate(checkpoint.get("optimizer_states", [])):
            state[f"{_OPTIMIZER}{index}"] = optimizer_state
        # Rank 0's name: paths may differ by node, for example by $HOME or a date.
        name, mark = self._agree_on_first((self._name(filepath), self._mark_at(filepath)))
        self._checkpoints.save(name, state)
        if mark is not None and self.local_rank == 0 and not is_directory(mark):
            Path(mark).parent.mkdir(parents=True, exist_ok=True)
            Path(mark).write_text(f"replicated_ckpt stores this checkpoint as {name}.\n", encoding="utf-8")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads the model and Lightning's own state. `load_optimizer_state_dict` loads the optimizers later.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader.
        """
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        state = {_MODEL: get_wanted_weights(self.model), **wanted_entries()}
        self._loaded_name = self._checkpoints.load(self._name(checkpoint_path), state, self._planner())
        own, first = values_in(state, trust_pickles=self._trust_pickles or weights_only is False)
        if is_fitting and own is not None:
            self._random = own["random"]
        elif is_fitting and self.global_rank == 0:
            warn(
                "Another number of ranks saved the checkpoint. Each rank gets Lightning's state of rank 0. Its random "
                "generators stay as they are."
            )
        checkpoint = {**(own or first)["rest"], _MODEL: state[_MODEL]}
        if "lr_schedulers" in checkpoint:  # missing with save_weights_only; otherwise Lightning needs both keys
            checkpoint["optimizer_states"] = []
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """Permanently removes a checkpoint from every node and the bucket."""
        name, mark = self._agree_on_first((self._name(filepath), self._mark_at(filepath)))
        self._checkpoints.delete(name)
        if mark is not None and self.local_rank == 0 and not is_directory(mark):
            Path(mark).unlink(missing_ok=True)

    def on_train_start(self) -> None:
        """Sets the random generators just before the first batch, because code after the load has drawn from them."""
        super().on_train_start()  # type: ignore[misc]
        self._count_step_as_saved()
        if self._random is not None:
            restore_random(self._random)
            self._random = None

    def _count_step_as_saved(self) -> None:
        """Keeps ModelCheckpoint from saving the resumed step again, in the middle of the next accumulation window.

        Lightning 2.6 saves no step twice, but after a restart its callback does not have the step that it saved last.
        """
        trainer = self.lightning_module.trainer
        if trainer.ckpt_path is None:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback._last_global_step_saved = trainer.global_step  # noqa: SLF001 - there is no public way

    def teardown(self) -> None:
        """Closes the writer and reader of `save_checkpoint` and `load_checkpoint`."""
        if "_checkpoints" in vars(self):
            self._checkpoints.close()
            del self._checkpoints
        super().teardown()  # type: ignore[misc]

    # Names ----------------------------------------------------------------------------------------------------------

    def _name(self, path: Any) -> str:
        """The name in the store for a path of Lightning's: its part below the root. Other paths become one part."""
        text: str = os.fspath(path)
        if is_newest(text):
            return text
        whole = Path(path).resolve()
        if whole.is_relative_to(self._root):
            return str(whole.relative_to(self._root))
        here = Path.cwd().resolve()
        parts = whole.relative_to(here).parts if whole.is_relative_to(here) else whole.parts[1:]
        # A checkpoint id must not begin with these characters.
        return ",".join(parts).lstrip(".-~ ")

    def _mark_at(self, path: Any) -> str | None:
        """The path of the small file, where Lightning looks for the checkpoint. None: the checkpoint itself lies there."""
        return None if Path(path).resolve().is_relative_to(self._root) else str(Path(path).absolute())

    def _agree_on_first(self, value: Any) -> Any:
        values = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def _planner(self) -> AdapterPlanner:
        return AdapterPlanner({_MODEL: self.model}, allow_partial_load=not self.lightning_module.strict_loading)

    def _restore_later(self, restore: Callable[..., None], *given: Any) -> None:
        """Replaces Lightning's restore of model and callbacks: `setup` calls it later."""
        self._restore = partial(restore, *given)

    def _resume_alike(
        self, resume_start: Callable[..., None], checkpoint_path: Any = None, weights_only: bool | None = None
    ) -> None:
        """Starts Lightning's resume with the same path on all ranks: that of the newest file on any rank's disk."""
        own: _Found | None = None
        if checkpoint_path is not None:
            age = -Path(checkpoint_path).stat().st_mtime if is_there(checkpoint_path) else 0.0
            own = _Found(not age, age, self._name(checkpoint_path), str(checkpoint_path))
        given = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(given, own)
        # Nodes may have lost their disks: the file of one rank is enough.
        found = min((each for each in given if each is not None), default=None)
        if found is None or is_newest(found.name):
            has_any = found is not None and self._checkpoints.find(found.name) is not None
            if found is not None and not has_any:
                rank_zero_info(f"There is no checkpoint in {self._root} yet: training starts from the beginning.")
            resume_start(found.name if found is not None and has_any else None, weights_only)
            return
        resume_start(self._root / found.name, weights_only)
        # Lightning never removes the checkpoint at this path. It must be the same on all ranks, but roots may differ.
        self.lightning_module.trainer._checkpoint_connector._ckpt_path = found.path  # noqa: SLF001 - no public way

    @cached_property
    def _checkpoints(self) -> NamedCheckpoints:
        return NamedCheckpoints(self._root, self._writer_options)


class ReplicatedModelParallelStrategy(ReplicatedStrategy, ModelParallelStrategy):
    """ModelParallelStrategy (FSDP2, tensor parallelism) whose checkpoints survive the loss of a node."""


class ReplicatedFSDPStrategy(ReplicatedStrategy, FSDPStrategy):
    """FSDPStrategy (FSDP1) whose checkpoints survive the loss of a node. They are always sharded."""


class ReplicatedDDPStrategy(ReplicatedStrategy, DDPStrategy):
    """DDPStrategy whose checkpoints survive the loss of a node."""
