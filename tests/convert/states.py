"""State dicts for the conversion tests, and functions that save and compare them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter

LARGE = (3, 2_000_000)
"""An int32 shape that is read in several pieces."""


@dataclass(frozen=True)
class Schedule:
    """An object that only a pickle can hold."""

    warmup_steps: int


def contents() -> dict[str, Any]:
    """A nested state dict with every kind of value that a training loop saves, and a large tensor."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer_state = {f"p{index}": values for index, values in optimizer.state_dict()["state"].items()}
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer_state,
        "history": [torch.arange(3), {"loss": torch.tensor(0.5)}],
        "large": torch.arange(math.prod(LARGE), dtype=torch.int32).reshape(LARGE),
        "odd": {
            "transposed": torch.randn(4, 6).t(),
            "empty": torch.empty(0, 5),
            "bfloat16": torch.randn(9).bfloat16(),
            "float8": torch.randn(9).to(torch.float8_e4m3fn),
            "uint16": torch.arange(5).to(torch.uint16),
            "bool": torch.tensor([True, False]),
        },
        "step": 1000,
        "scheduler": {"last_epoch": 3, "milestones": [1, 5], "name": "cosine"},
    }


def checkpoint(root: Path, state: dict[str, Any] | None = None, checkpoint_id: str = "step-1") -> dict[str, Any]:
    """Saves a state dict into a store from this process alone, and returns the state dict."""
    state = contents() if state is None else state
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=ReplicatedWriter(root, copies=1), no_dist=True)
    return state


def scheduled() -> dict[str, Any]:
    """A state dict with an object that `weights_only` refuses."""
    return {"weight": torch.ones(3), "schedule": Schedule(7)}


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    """Asserts equal types, structure, dtypes and bits."""
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert torch.equal(bits(found), bits(wanted)), where
    elif isinstance(wanted, dict):
        assert sorted(found) == sorted(wanted), where
        for key, value in wanted.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for index, value in enumerate(wanted):
            assert_equal(found[index], value, f"{where}/{index}")
    else:
        assert found == wanted, where


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def blank(state: Any) -> Any:
    """The same structure and shapes with empty values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return type(state)()


def tensors_of(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors by FQN."""
    if isinstance(state, torch.Tensor):
        return {prefix.rstrip("."): state}
    children = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: value for key, child in children for name, value in tensors_of(child, f"{prefix}{key}.").items()}
