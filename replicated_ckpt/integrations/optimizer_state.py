"""The state of an optimizer under its model's names, as a framework saves and restores it."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from replicated_ckpt.dcp.planning.matched_state import MatchedState, StateOf


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
