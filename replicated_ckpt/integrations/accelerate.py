"""Hugging Face Accelerate: an Accelerator whose checkpoints survive the loss of a node."""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from replicated_ckpt.integrations import check_versions

check_versions("accelerate")  # before the import, which may fail with an older version

from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME, DistributedType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.config import Retention
from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.reading.newest import Newest
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

_MODEL, _OPTIMIZER = "model_{}", "optimizer_{}"
_SCHEDULER = re.compile(rf"{SCHEDULER_NAME}(_[0-9]+)?\.bin")
_TORCH_FILES = re.compile(
    rf"({SCHEDULER_NAME}|{SAMPLER_NAME}|dl_state_dict)(_[0-9]+)?\.bin|{SCALER_NAME}|{RNG_STATE_NAME}_[0-9]+\.pkl"
)
"""Names of the files that Accelerate itself reads. The program's hooks write and read other files."""


class PreparedLoader(ReplayedLoader):
    """A data loader that an Accelerator has prepared. Accelerate counts its epochs, and shuffles by their number."""

    loader: Any

    def has_own_state(self) -> bool:
        """Accelerate's loaders always have `state_dict`, but it works only with `use_stateful_dataloader`."""
        return bool(getattr(self.loader, "use_stateful_dataloader", False))

    def start_workers(self) -> None:
        iter(self.loader.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        # After the epoch's last batch, Accelerate counts the epoch only when the loop asks for one more batch.
        if "epoch" not in state:
            is_between = state["is_over"] and not state["is_exhausted"]
            state["epoch"] = getattr(self.loader, "iteration", 0) + is_between
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loader.iteration = state_dict["epoch"]

    def _resume(self) -> Iterator[Any]:
        """The remaining batches. Accelerate makes the loader's iterator at the first batch."""
        # Reads the first batch before the load sets the random generators, because making the iterator draws from them.
        batches = super()._resume()
        return chain(list(islice(batches, 1)), batches)

    def skip(self, batches: int) -> Iterable[Any]:
        """The rest of an epoch after `batches` batches. A load has already skipped those that it counted as yielded."""
        if not batches:
            return self
        # Without a position from a load, skips as Accelerate does.
        if self._loaded is None or not self._loaded["yielded"]:
            return _Behind(self, batches)
        if self._loaded["yielded"] != batches:
            raise ConfigInvalid(
                f"skip_first_batches asked for {batches} batches, and the loaded checkpoint has {self._loaded['yielded']}.",
                "Register the object that counts batches for checkpointing, or skip none: the loader continues by itself.",
            )
        return [] if self._loaded["is_over"] else self


class _Behind:
    """The batches of a loader after the first `batches` ones, which count as yielded."""

    def __init__(self, loader: PreparedLoader, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        return len(self._loader) - self._batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._batches, None)


def _check_as_many(what: str, now: Sequence[Any], saved: Sequence[Any]) -> None:
    if len(now) != len(saved):
        raise ConfigInvalid(
            f"This program has {len(now)} {what}, but the program that saved the checkpoint had {len(saved)}.",
            "Prepare and register the same objects, in the same order, before load_state. Models and optimizers are "
            "already loaded.",
        )


class ReplicatedAccelerator(Accelerator):
    """An Accelerator whose `save_state` and `load_state` use a store on each node.

    They save and restore what Accelerate's own methods do: prepared models and optimizers (FSDP2, DDP), schedulers and
    scaler. For each rank they also save and restore its generators, the objects from `register_for_checkpointing`, and
    the position of each prepared data loader. After a load, a loop over such a loader continues in the middle of the
    epoch. So does a loop over `skip_first_batches`, with the number of batches that were read before the save.

    The last part of `output_dir` names the checkpoint. `automatic_checkpoint_naming` and `total_limit` work, too.

    Args:
        replicated_root: this node's store, a directory on a node-local disk.
        writer_options: other arguments of ReplicatedWriter: copies, ack, object_store, ...
        trust_pickles: allow any class in the states of registered objects.
        adapter_only: for a model with PEFT's adapters, a save leaves out the frozen base. False: it includes the base.
        args, kwargs: as of Accelerator.
    """

    step: int

    def __init__(
        self,
        *args: Any,
        replicated_root: str | os.PathLike[str],
        writer_options: Mapping[str, Any] | None = None,
        trust_pickles: bool = False,
        adapter_only: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigInvalid(
                f"{self.distributed_type} manages model and optimizer itself, so DCP cannot save them.",
                "Train with DDP or FSDP; or use accelerate's own Accelerator, which saves to a shared directory.",
            )
        limit = self.project_configuration.total_limit
        retention = None if limit is None else Retention(keep_last=limit)
        self._replicated_root = Path(replicated_root)
        self._writer_options = {"retention": retention, **(writer_options or {})}
        self._trust_pickles = trust_pickles
        self._adapter_only = adapter_only
        self._loaders: list[PreparedLoader] = []

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator's. Saves and restores the loader's position.

        `use_stateful_dataloader` applies only to data sets with a state. For other data sets, torchdata counts the batches
        but not the random numbers of Accelerate's samplers and workers, and would continue with other batches.
        """
        config, has_state = self.dataloader_config, isinstance(data_loader.dataset, Stateful)
        is_wanted = config.use_stateful_dataloader
        config.use_stateful_dataloader = is_wanted and has_state
        try:
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        finally:
            config.use_stateful_dataloader = is_wanted
        if isinstance(prepared, PreparedLoader):
            # A loader that is prepared twice has one position in the checkpoint, not two.
            return prepared
        self._loaders.append(PreparedLoader(prepared))
        return self._loaders[-1]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerator's. After `load_state`, skips no batch twice."""
        if not isinstance(dataloader, PreparedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        return dataloader.skip(num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerator's."""
        self._loaders = []
        return super().free_memory(*objects)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Returns the name of the checkpoint after its commit.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedWriter. ConfigInvalid: `output_dir` is missing.
        """
        del safe_serialization, kwargs
        name = self._name_of(output_dir)
        weights = [get_model_state_dict(model) for model in self._models]
        if self._adapter_only:
            weights = [drop_base(model, each) for model, each in zip(self._models, weights, strict=True)]
        left = list(weights)  # hooks remove the models that they save themselves, perhaps only on one rank
        with tempfile.TemporaryDirectory() as directory:
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, left, directory)
            save_accelerator_state(
                directory, [], [], self._schedulers, self._dataloaders, self.process_index, self.step, self.scaler
            )
            files = collect_files(Path(directory))
        own = {"files": files, "random": capture_random(), "loaders": [each.state_dict() for each in self._loaders]}
        own["registered"] = [each.state_dict() for each in self._custom_objects]
        # If a hook removes a model on one rank only, the ranks must still have the same plan: all models are saved.
        saved = left if len(left) == len(weights) else weights
        state: dict[str, Any] = {_MODEL.format(index): each for index, each in enumerate(saved)}
        self._checkpoints.save(name, {**state, **self._optimizer_states(get_saved_state), **entries_of(own)})
        self.project_configuration.iteration += 1
        return name

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> str | None:
        """Restores a checkpoint, by default the newest complete one, and returns its name. None: there is no checkpoint.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader, on every rank.
        """
        del kwargs
        newest = self._checkpoints.newest
        name = newest if input_dir is None or Path(input_dir).name == LATEST else Path(input_dir).name
        if name == newest and self._checkpoints.find(newest) is None:
            return None
        # A copy: the hooks of `_load_rest` may remove models from it.
        models = list(self._models)
        by_key = {_MODEL.format(index): model for index, model in enumerate(models)}
        state: dict[str, Any] = {key: get_wanted_weights(model) for key, model in by_key.items()}
        state |= {**self._optimizer_states(get_wanted_state), **wanted_entries()}
        loaded = self._checkpoints.load(name, state, AdapterPlanner(by_key))
        for key, model in by_key.items():
            set_model_state_dict(model, state[key])
        for index, optimizer in enumerate(self._optimizers):
            set_loaded_state(self._model_of(optimizer), optimizer.optimizer, state[_OPTIMIZER.format(index)])
        own, first = values_in(state, trust_pickles=self._trust_pickles)
        self._load_rest(models, first["files"], None if own is None else own["files"], load_kwargs)
        _check_as_many("registered objects", self._custom_objects, (own or first)["registered"])
        for registered, value in zip(self._custom_objects, (own or first)["registered"], strict=True):
            registered.load_state_dict(value)
        if own is None:
            self._warn_of_other_world()
            return loaded
        _check_as_many("prepared data loaders", self._loaders, own["loaders"])
        for loader, position in zip(self._loaders, own["loaders"], strict=True):
            loader.load_state_dict(position)
        # Last: the steps above draw random numbers.
        restore_random(own["random"])
        return loaded

    def _load_rest(
        self, models: list[Any], first: Mapping[str, bytes], own: Mapping[str, bytes] | None, load_kwargs: Any
    ) -> None:
        """Loads files, schedulers, scaler and step. With another number of ranks, all get rank 0's: their accumulation
        windows must agree.
        """
        files, rank, loaders = (
            (first, 0, []) if own is None else ({**first, **own}, self.process_index, self._dataloaders)
        )
        schedulers = [name for name in files if _SCHEDULER.fullmatch(name)]
        _check_as_many("prepared schedulers", self._schedulers, schedulers)
        before = capture_random()
        with tempfile.TemporaryDirectory() as directory:
            put_files(Path(directory), files, torch_files=_TORCH_FILES, trust_pickles=self._trust_pickles)
            for hook in self._load_model_state_pre_hook.values():
                hook(models, directory)
            rest = self._schedulers, loaders, rank, self.scaler, None, load_kwargs
            self.step = load_accelerator_state(directory, [], [], *rest).get("step", self.step)
        # Accelerate has set the generators of its own files. `load_state` sets this rank's at the end.
        restore_random(before)

    def _optimizer_states(self, get_state: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
        return {
            _OPTIMIZER.format(index): get_state(self._model_of(each), each.optimizer)
            for index, each in enumerate(self._optimizers)
        }

    def _model_of(self, optimizer: Any) -> Any:
        """The prepared model whose parameters an optimizer updates."""
        stepped = {id(parameter) for group in optimizer.optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in stepped for parameter in model.parameters()):
                return model
        raise ConfigInvalid("An optimizer has no parameter of a prepared model.", "Prepare its model, too.")

    def _name_of(self, output_dir: Any) -> str:
        if self.project_configuration.automatic_checkpoint_naming:
            return f"checkpoint_{self.save_iteration}"
        if output_dir is None:
            raise ConfigInvalid(
                "save_state got no output_dir, which names the checkpoint.",
                "Pass one, or ProjectConfiguration(automatic_checkpoint_naming=True).",
            )
        return Path(output_dir).name

    def _warn_of_other_world(self) -> None:
        if self.is_main_process:
            warn(
                "Another number of ranks saved the checkpoint. Each rank gets rank 0's registered objects. Its random "
                "generators and data loaders stay as they are."
            )

    @cached_property
    def _checkpoints(self) -> NamedCheckpoints:
        form = "checkpoint_{}" if self.project_configuration.automatic_checkpoint_naming else ""
        return NamedCheckpoints(self._replicated_root, self._writer_options, newest=str(Newest("", form)))

    def end_training(self) -> None:
        """As Accelerator's. Also closes the writer and reader of `save_state` and `load_state`."""
        if "_checkpoints" in vars(self):
            self._checkpoints.close()
            del self._checkpoints
        super().end_training()
