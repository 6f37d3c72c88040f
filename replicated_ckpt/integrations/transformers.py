"""Hugging Face transformers: a Trainer whose checkpoints survive the loss of a node, and a mixin for trl's trainers."""

import contextlib
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from replicated_ckpt.integrations import check_versions

check_versions("transformers")  # before the import, which may fail with an older version

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import Trainer
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from replicated_ckpt.config import Retention
from replicated_ckpt.core.manifest import encode_notes
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.dcp.rank_state.rank_state import entries_of, rank_and_world, values_in, wanted_entries
from replicated_ckpt.dcp.runtime.user_code import warn
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.integrations.directory_files import collect_files, put_files
from replicated_ckpt.integrations.model_state import (
    AdapterPlanner,
    drop_base,
    get_saved_state,
    get_wanted_state,
    get_wanted_weights,
    set_loaded_state,
)
from replicated_ckpt.stores.files.existence import is_there

_MODEL, _OPTIMIZER = "model", "optimizer"
_FILES = re.compile(rf"{re.escape(TRAINER_STATE_NAME)}|{SCHEDULER_NAME}|{SCALER_NAME}|rng_state(_[0-9]+)?\.pth")
"""Names of the files of `_collect_files`. A load restores no others, because Trainer would read some of them."""
_BEST = "best_so_far"
"""A metric of only those checkpoints that were the best when Trainer saved them. Retention keeps the newest of these."""
_COUNTERS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "_total_train_tokens",
)
"""Counters for the logs of Trainer and trl's trainers, which these do not save. They differ by version.

`_tr_loss`, a tensor, and `_metrics`, lists of numbers since the last log by mode ("train") and name, are not among them.
"""


@contextlib.contextmanager
def _as_if_without_optimizer(model: Any = None, args: Any = None, *others: Any, **more: Any) -> Iterator[None]:
    """Sets `save_only_model` for a block: without it, Trainer refuses a model that transformers has sharded."""
    del others, more
    is_refused = getattr(model, "is_distributed_loading_by_transformers", False) and not args.save_only_model
    if is_refused:
        args.save_only_model = True
    try:
        yield
    finally:
        if is_refused:
            args.save_only_model = False


class ReplicatedTrainerMixin:
    """A base class before Trainer or its subclass: `class ReplicatedSFTTrainer(ReplicatedTrainerMixin, SFTTrainer)`.

    `save_strategy`, `save_steps`, `save_total_limit`, `load_best_model_at_end`, `save_only_model` and
    `train(resume_from_checkpoint=...)` keep their meaning, except that checkpoints lie in a store on each node.
    `resume_from_checkpoint=True` loads the newest complete checkpoint, the same on every rank. Without a checkpoint,
    training begins anew. A path that ends with `checkpoint-<step>` means the checkpoint of that step.

    Model and optimizer are saved sharded, under the model's own names. TrainerState, callbacks, schedule, scaler and
    generators are saved for each rank. If as many ranks load as saved, each gets its own state. Another number of ranks
    gets rank 0's, and warns.

    Args:
        replicated_root: this node's store, a directory on a node-local disk. None: `replicated` in `args.output_dir`.
        writer_options: other arguments of ReplicatedWriter: copies, ack, object_store, ...
        trust_pickles: allow any class in a scheduler's state.
        adapter_only: for a model with PEFT's adapters, a save leaves out the frozen base. False: it includes the base.
    """

    args: Any
    accelerator: Any
    callback_handler: Any
    control: Any
    lr_scheduler: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    state: Any
    _tr_loss: Any

    def __init__(
        self,
        *args: Any,
        replicated_root: str | os.PathLike[str] | None = None,
        writer_options: Mapping[str, Any] | None = None,
        trust_pickles: bool = False,
        adapter_only: bool = True,
        **kwargs: Any,
    ) -> None:
        with _as_if_without_optimizer(*args, **kwargs):
            super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:  # type: ignore[attr-defined]  # Trainer's
            raise ConfigInvalid(
                "DeepSpeed manages model and optimizer itself, so DCP cannot save them.",
                "Train with DDP or FSDP; or use transformers' own Trainer, which saves to a shared directory.",
            )
        self._root = Path(self.args.output_dir) / "replicated" if replicated_root is None else Path(replicated_root)
        self._writer_options = {"retention": self._choose_retention(), **(writer_options or {})}
        self._trust_pickles = trust_pickles
        self._adapter_only = adapter_only
        self._restored_from: tuple[str, str] | None = None
        self._best_path: str | None = None
        self._counters: dict[str, Any] | None = None
        self._elapsed_s = 0.0

    def _choose_retention(self) -> Retention | None:
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return None
        return Retention(keep_last=limit, keep_best=_BEST, best_is="max")

    # Saving ---------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Replaces Trainer's. Returns after the commit.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedWriter.
        """
        del model, trial
        self.store_flos()  # type: ignore[attr-defined]
        self._name_best()
        weights = get_model_state_dict(self.model_wrapped)
        state: dict[str, Any] = {_MODEL: drop_base(self.model_wrapped, weights) if self._adapter_only else weights}
        if not self.args.save_only_model:
            state[_OPTIMIZER] = get_saved_state(self.model_wrapped, self._plain_optimizer())
        state |= entries_of({"files": self._collect_files(), "counters": self._collect_counters()})
        metrics = {_BEST: 1} if self.state.best_global_step == self.state.global_step else None
        self._checkpoints.save(
            f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", state, notes=encode_notes(metrics, None)
        )

    def _name_best(self) -> None:
        """Sets Trainer's path of the best checkpoint, if that is saved or is this one."""
        if self.state.best_global_step:
            path = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            is_this = self.state.best_global_step == self.state.global_step
            if str(path) != self.state.best_model_checkpoint and (is_this or self._checkpoints.find(path.name)):
                self.state.best_model_checkpoint = str(path)

    def _collect_files(self) -> dict[str, bytes]:
        """The content of the files that Trainer writes besides the model, by name."""
        self._export_callbacks()
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            self.state.save_to_json(str(directory / TRAINER_STATE_NAME))
            if not self.args.save_only_model:
                self._save_rng_state(name)  # type: ignore[attr-defined]
                torch.save(self.lr_scheduler.state_dict(), directory / SCHEDULER_NAME)
                scaler = getattr(self.accelerator, "scaler", None)
                if scaler is not None:
                    torch.save(scaler.state_dict(), directory / SCALER_NAME)
            return collect_files(directory)

    def _export_callbacks(self) -> None:
        """Puts the callbacks' states into the TrainerState, as `Trainer._save_checkpoint` of transformers 5.23 does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, exported = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(exported)
                else:
                    self.state.stateful_callbacks[name] = exported

    def _collect_counters(self) -> dict[str, Any]:
        # Trainer's own time begins anew with each process.
        elapsed_s = time.time() - self._started_at + self._elapsed_s
        return {
            "elapsed_s": elapsed_s,
            "loss": self._tr_loss.item(),
            "metrics": {mode: dict(lists) for mode, lists in self._running_metrics().items()},
            **{name: getattr(self, name) for name in _COUNTERS if hasattr(self, name)},
        }

    def _running_metrics(self) -> dict[str, Any]:
        """The values that trl's trainers average in their next log, by mode."""
        metrics = getattr(self, "_metrics", None)
        if isinstance(metrics, dict) and all(isinstance(each, defaultdict) for each in metrics.values()):
            return metrics
        return {}

    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # Resuming -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader, on every rank.
        """
        self._started_at, self._elapsed_s, self._counters, self._restored_from = time.time(), 0.0, None, None
        try:
            if not resume_from_checkpoint:
                return super().train(None, *args, **kwargs)  # type: ignore[misc]
            found = self._checkpoints.find(
                self._checkpoints.newest if resume_from_checkpoint is True else Path(resume_from_checkpoint).name
            )
            # Trainer itself reads its own directories, from before the switch to this class.
            if found is None:
                given = None if resume_from_checkpoint is True else resume_from_checkpoint
                return super().train(given, *args, **kwargs)  # type: ignore[misc]
            with tempfile.TemporaryDirectory() as directory:
                self._restore_files(found, Path(directory))
                return super().train(directory, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._close()

    def _restore_files(self, name: str, directory: Path) -> None:
        """Writes the files into the directory that Trainer reads. Model and optimizer follow when they are sharded."""
        state = wanted_entries()
        self._checkpoints.load(name, state)
        own, first = values_in(state, trust_pickles=self._trust_pickles)
        # Only files that this class wrote: Trainer also reads others from a directory, such as weights.
        files = {file: raw for file, raw in (own or first)["files"].items() if _FILES.fullmatch(file)}
        saved = json.loads(files[TRAINER_STATE_NAME])
        self._best_path = saved.pop("best_model_checkpoint", None)  # Trainer would look for this directory, and warn
        files[TRAINER_STATE_NAME] = json.dumps(saved).encode()
        if own is not None:
            self._counters = own["counters"]
        else:
            # With rank 0's generators, all ranks would draw the same random numbers.
            files = {file: content for file, content in files.items() if not file.startswith("rng_state")}
            if rank_and_world()[0] == 0:
                warn(
                    f"Another number of ranks saved checkpoint {name!r}. Each rank gets the schedule, counters and "
                    "callbacks of rank 0. Its random generators stay as they are, and the data is divided anew."
                )
        put_files(directory, files, trust_pickles=self._trust_pickles)
        self._restored_from = (name, str(directory))

    def _is_ours(self, directory: Any) -> bool:
        return self._restored_from is not None and directory == self._restored_from[1]

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        """Does nothing for a checkpoint of this class: `_load_optimizer_and_scheduler` loads it into the wrapped model."""
        if not self._is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if not self._is_ours(checkpoint) or self._restored_from is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        schedule = Path(checkpoint) / SCHEDULER_NAME
        state: dict[str, Any] = {_MODEL: get_wanted_weights(self.model_wrapped)}
        if is_there(schedule):  # without save_only_model
            state[_OPTIMIZER] = get_wanted_state(self.model_wrapped, self._plain_optimizer())
        self._checkpoints.load(self._restored_from[0], state, self._planner())
        set_model_state_dict(self.model_wrapped, state[_MODEL])
        if is_there(schedule):
            set_loaded_state(self.model_wrapped, self._plain_optimizer(), state[_OPTIMIZER])
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=not self._trust_pickles))

    def _init_training_state(
        self, max_steps: Any, steps: Any, epochs: Any, resume_from_checkpoint: Any, trial: Any
    ) -> Any:
        """As Trainer's. Sets the best checkpoint's path, at which Trainer would find no directory."""
        done = super()._init_training_state(max_steps, steps, epochs, resume_from_checkpoint, trial)  # type: ignore[misc]
        if self._is_ours(resume_from_checkpoint):
            self.state.best_model_checkpoint = self._best_path
        return done

    def _load_rng_state(self, checkpoint: Any) -> None:
        """As Trainer's, which calls it just before the first step. Also restores the counters for Trainer's logs."""
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        counters, self._counters = self._counters, None
        if counters is not None:
            self._tr_loss += counters["loss"]
            self._elapsed_s = counters["elapsed_s"]
            for name in counters.keys() & _COUNTERS:
                setattr(self, name, counters[name])
            for mode, lists in self._running_metrics().items():
                lists.update(counters.get("metrics", {}).get(mode, {}))  # a checkpoint of an older version has none

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """As Trainer's, with the time of all parts of the run together."""
        return super()._finalize_training(trial, num_train_samples, start_time - self._elapsed_s)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        """Loads the model of the best checkpoint."""
        name = Path(self.state.best_model_checkpoint).name
        state = {_MODEL: get_wanted_weights(self.model_wrapped)}
        self._checkpoints.load(name, state, self._planner())
        set_model_state_dict(self.model_wrapped, state[_MODEL])

    def _planner(self) -> AdapterPlanner:
        return AdapterPlanner({_MODEL: self.model_wrapped})

    @cached_property
    def _checkpoints(self) -> NamedCheckpoints:
        newest = str(Newest("", f"{PREFIX_CHECKPOINT_DIR}-{{}}"))
        return NamedCheckpoints(self._root, self._writer_options, newest=newest)

    def _close(self) -> None:
        if "_checkpoints" in vars(self):
            self._checkpoints.close()
            del self._checkpoints


class ReplicatedTrainer(ReplicatedTrainerMixin, Trainer):
    """Trainer, with checkpoints that survive the loss of a node."""
