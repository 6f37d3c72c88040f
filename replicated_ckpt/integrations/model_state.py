"""The weights and optimizer state that an integration saves and loads, also with PEFT's adapters. PEFT is not imported."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from replicated_ckpt.dcp.planning.matched_state import MatchedState, StateOf
from replicated_ckpt.dcp.rank_state.rank_state import RankStatePlanner
from replicated_ckpt.errors import ConfigInvalid

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Parts of a parameter's name that `get_model_state_dict` leaves out."""


def find_base(model: nn.Module) -> set[str]:
    """The frozen weights below PEFT's adapters, by their names in `get_model_state_dict`. Empty without adapters.

    Weights of any adapter, trainable weights, buffers and weights outside of PEFT's model are not among them.
    """
    base = set()
    for path, adapted in _find_adapted(model, ()):
        # Tied weights have several names in the state dict.
        for name, parameter in adapted.named_parameters(remove_duplicate=False):
            parts = [part for part in name.split(".") if part not in _WRAPPERS]
            # PEFT keeps the weights of each adapter under its name: "lora_A.default.weight".
            if not parameter.requires_grad and adapted.peft_config.keys().isdisjoint(parts):
                base.add(".".join((*path, *parts)))
    return base


def drop_base(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that a save with `adapter_only` writes: neither those of `find_base` nor their quantization constants."""
    base = find_base(model)
    return {name: value for name, value in weights.items() if name not in base and not _is_constant(name, base)}


def get_wanted_weights(model: nn.Module) -> dict[str, Any]:
    """The weights that a load fills and `set_model_state_dict` sets. The base is among them.

    Quantization constants of a frozen weight stay as they are: torch refuses to set them.
    """
    base = find_base(model)
    return {name: value for name, value in get_model_state_dict(model).items() if not _is_constant(name, base)}


def _is_constant(name: str, base: set[str]) -> bool:
    """Whether it belongs to a weight of the base: bitsandbytes adds "x.weight.absmax" and others for "x.weight"."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in base for end in range(1, len(parts)))


def _find_adapted(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The outermost modules with adapters, by their path."""
    # PeftModel has this attribute, and so have models of transformers and diffusers after `add_adapter`.
    adapters = getattr(module, "peft_config", None)
    # A user's module may have settings of that name.
    if adapters and isinstance(adapters, Mapping) and all(hasattr(each, "peft_type") for each in adapters.values()):
        yield path, module
        return
    for name, child in module.named_children():
        is_wrapped = isinstance(module, DistributedDataParallel) or name in _WRAPPERS
        yield from _find_adapted(child, path if is_wrapped else (*path, name))


class AdapterPlanner(RankStatePlanner):
    """Weights of the base that the checkpoint does not have stay as they are in the model.

    Args:
        models: those in the state dict, by their key.
        options: as of DefaultLoadPlanner.
    """

    def __init__(self, models: Mapping[str, nn.Module], **options: Any) -> None:
        super().__init__(**options)
        self._base = [(key, name) for key, model in models.items() for name in sorted(find_base(model))]

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As of RankStatePlanner.

        Raises:
            ConfigInvalid: the checkpoint has the adapter only, and the model's base is on the meta device.
        """
        saved = None if metadata is None else metadata.state_dict_metadata
        absent = [
            (key, name)
            for key, name in self._base
            # Lightning loads models and optimizers one after the other.
            if saved is not None and f"{key}.{name}" not in saved and name in state_dict.get(key, ())
        ]
        for key, name in absent:
            # DCP would put an empty tensor in its place.
            if state_dict[key][name].is_meta:
                raise ConfigInvalid(
                    f"The checkpoint has the adapter only, and {name} of the model has no values yet.",
                    "Load the base into the model first, with from_pretrained; or load a checkpoint that was saved with "
                    "adapter_only=False.",
                )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for key, name in absent:
            del self.state_dict[f"{key}.{name}"]


def get_saved_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state to save. An optimizer without a step is left so: torch makes a step to find the names."""
    is_new = not optimizer.state
    state = dict(get_optimizer_state_dict(model, optimizer))
    # torch's step of zeros would be saved as real momentum, and change the training.
    if is_new:
        optimizer.state.clear()
        state["state"] = {}
    return state


def get_wanted_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state that a load fills: all that the checkpoint has for the optimizer's parameters, frozen ones too.

    Under FSDP1 the state of a parameter that is frozen now is not loaded.
    """
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    # FSDP1 flattens parameters: a frozen one has no entry of its own there.
    if not FullyShardedDataParallel.fsdp_modules(model):
        for group, named in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, name in zip(group["params"], named["params"], strict=True):
                state["state"].setdefault(name, StateOf(parameter))
    return state


def set_loaded_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Sets the state that a load has filled. A parameter without a saved state has none afterwards."""
    found = [each.asked.parameter for each in state["state"].values() if _is_of_other(each)]
    frozen = [parameter for parameter in found if not parameter.requires_grad]
    for parameter in frozen:  # torch skips frozen parameters
        parameter.requires_grad_(True)
    try:
        set_optimizer_state_dict(model, optimizer, state)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    # An empty state makes optimizers fail at their next step; without one they make it anew.
    for parameter in [parameter for parameter, values in optimizer.state.items() if not values]:
        del optimizer.state[parameter]


def _is_of_other(state: Any) -> bool:
    """Whether only the checkpoint has this state."""
    return isinstance(state, MatchedState) and isinstance(state.asked, StateOf)
