"""What DCP's plan of a state dict follows from, so that an equal one needs no planning."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from replicated_ckpt.dcp.runtime.torch_private import DTensor, local_part

Basis = tuple[bool, tuple[str, ...], tuple[Any, ...]]
"""Names in their order, and of each value all that DCP's `create_default_local_save_plan` (torch 2.7 to 2.15) looks at."""


def basis_of(state_dict: Mapping[str, Any], *, is_coordinator: bool) -> Basis | None:
    """Of a state dict that is flat. Two that are equal give equal plans; None: there is a value that may plan itself."""
    values = tuple(_basis_of_value(value) for value in state_dict.values())
    return None if None in values else (is_coordinator, tuple(state_dict), values)


def is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor of torch's own, without attributes by which it could say what DCP is to make of it."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not vars(value)


def _basis_of_value(value: object) -> tuple[Any, ...] | None:
    kind = type(value)
    if is_plain_tensor(value):
        return _basis_of_tensor(value)
    if isinstance(value, DTensor) and kind is DTensor:
        part = local_part(value)
        if not is_plain_tensor(part):
            return None
        layout = value.device_mesh, value.placements, value.shape, value.stride(), value.requires_grad
        return *layout, *_basis_of_tensor(part)
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return None
    return (kind,)


def _basis_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad, tensor.device
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.device, tensor.is_pinned()
