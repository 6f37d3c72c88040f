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
"""Parts of parameters' names that `get_model_state_dict` leaves out."""


def find_base(model: nn.Module) -> set[str]:
    """The names, in `get_model_state_dict`, of the base: the frozen weights below PEFT's adapters. Empty without adapters.

    The base has no adapter's weights, no trainable weights, no buffers, and no weights outside of PEFT's model.
    """
    base = set()
    for path, adapted in _find_adapted(model, ()):
        # Tied weights have several names in the state dict.
        for name, parameter in adapted.named_parameters(remove_duplicate=False):
            parts = [part for part in name.split(".") if part not in _WRAPPERS]
            # PEFT's names of an adapter's weights contain the adapter's name: "lora_A.default.weight".
            if not parameter.requires_grad and adapted.peft_config.keys().isdisjoint(parts):
                base.add(".".join((*path, *parts)))
    return base


def drop_base(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that a save with `adapter_only` writes: without the base and its quantization constants."""
    base = find_base(model)
    return {name: value for name, value in weights.items() if name not in base and not _is_constant(name, base)}


def get_wanted_weights(model: nn.Module) -> dict[str, Any]:
    """The weights that a load fills and `set_model_state_dict` sets, including the base.

    Without quantization constants of the base, which torch refuses to set.
    """
    base = find_base(model)
    return {name: value for name, value in get_model_state_dict(model).items() if not _is_constant(name, base)}


def _is_constant(name: str, base: set[str]) -> bool:
    """Whether a name is a quantization constant of the base. For "x.weight", bitsandbytes adds "x.weight.absmax", say."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in base for end in range(1, len(parts)))


def _find_adapted(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The outermost modules with adapters, and their paths."""
    # PeftModel has this attribute. Models of transformers and diffusers have it after `add_adapter`.
    adapters = getattr(module, "peft_config", None)
    # A user's own module may have an attribute of that name.
    if adapters and isinstance(adapters, Mapping) and all(hasattr(each, "peft_type") for each in adapters.values()):
        yield path, module
        return
    for name, child in module.named_children():
        is_wrapped = isinstance(module, DistributedDataParallel) or name in _WRAPPERS
        yield from _find_adapted(child, path if is_wrapped else (*path, name))


class AdapterPlanner(RankStatePlanner):
    """A planner that leaves the model's base as it is, if the checkpoint has no base.

    Args:
        models: the models in the state dict, by their key.
        options: as of DefaultLoadPlanner.
    """

    def __init__(self, models: Mapping[str, nn.Module], **options: Any) -> None:
        super().__init__(**options)
        self._base = [(key, name) for key, model in models.items() for name in sorted(find_base(model))]

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As in RankStatePlanner.

        Raises:
            ConfigInvalid: the checkpoint has only the adapter, and the model's base is on the meta device.
        """
        saved = None if metadata is None else metadata.state_dict_metadata
        absent = [
            (key, name)
            for key, name in self._base
            # Lightning loads models and optimizers one after the other.
            if saved is not None and f"{key}.{name}" not in saved and name in state_dict.get(key, ())
        ]
        for key, name in absent:
            # DCP would replace the meta tensor by an empty one.
            if state_dict[key][name].is_meta:
                raise ConfigInvalid(
                    f"The checkpoint has only the adapter, and {name} of the model has no values yet.",
                    "Load the base into the model first, with from_pretrained; or load a checkpoint that was saved with "
                    "adapter_only=False.",
                )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for key, name in absent:
            del self.state_dict[f"{key}.{name}"]


def get_saved_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer state to save. An optimizer without state keeps none, although torch makes a step to find the names."""
    is_new = not optimizer.state
    state = dict(get_optimizer_state_dict(model, optimizer))
    # Saved as real momentum, the zeros of torch's step would change the training.
    if is_new:
        optimizer.state.clear()
        state["state"] = {}
    return state


def get_wanted_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state that a load fills: the checkpoint's state of all parameters of the optimizer, including frozen ones.

    Under FSDP1 it lacks the state of a parameter that is frozen now.
    """
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    # FSDP1 flattens parameters: a frozen one has no own entry.
    if not FullyShardedDataParallel.fsdp_modules(model):
        for group, named in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, name in zip(group["params"], named["params"], strict=True):
                state["state"].setdefault(name, StateOf(parameter))
    return state


def set_loaded_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Sets the state that a load has filled. Afterwards, a parameter has state only if the checkpoint has some for it."""
    found = [each.asked.parameter for each in state["state"].values() if _is_of_other(each)]
    frozen = [parameter for parameter in found if not parameter.requires_grad]
    for parameter in frozen:  # torch skips frozen parameters
        parameter.requires_grad_(True)
    try:
        set_optimizer_state_dict(model, optimizer, state)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    # With an empty state, optimizers fail at their next step. Without one, they make a new state.
    for parameter in [parameter for parameter, values in optimizer.state.items() if not values]:
        del optimizer.state[parameter]


def _is_of_other(state: Any) -> bool:
    """Whether the checkpoint has this state and the optimizer does not."""
    return isinstance(state, MatchedState) and isinstance(state.asked, StateOf)
