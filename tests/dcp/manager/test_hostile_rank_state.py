"""A rank's own item that an attacker wrote: a typed error, no code is run, and no memory outside the item is read."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replicated_ckpt import RankState, ReplayedLoader
from replicated_ckpt.dcp.rank_state.rank_state import capture_random, name_rank_item, pack
from replicated_ckpt.errors import ReplicatedCkptError

NAME = name_rank_item(0, 1)
MANY = 1 << 30


def at(position: int) -> dict[str, Any]:
    state: dict[str, Any] = capture_random()["numpy"]
    return {**state, "state": {**state["state"], "pos": position}}


def philox(position: int) -> dict[str, Any]:
    state: dict[str, Any] = dict(np.random.Philox(1).state)
    return {**state, "buffer_pos": position}


def with_random(**more: Any) -> Callable[[], Any]:
    return lambda: {"random": {**capture_random(), **more}}


ITEMS: dict[str, Callable[[], Any]] = {
    "numpy position past the end": with_random(numpy=at(MANY)),
    "numpy position before the start": with_random(numpy=at(-MANY)),
    "numpy position is a text": with_random(numpy={**at(0), "state": {"pos": "x"}}),
    "Philox position past the end": with_random(numpy=philox(MANY)),
    "numpy state is a list": with_random(numpy=[]),
    "python position past the end": with_random(python=(3, [0] * 624 + [MANY], None)),
    "python state too short": with_random(python=(3, [0], None)),
    "python state of texts": with_random(python=(3, ["x"] * 625, None)),
    "torch state too short": with_random(torch=torch.zeros(3, dtype=torch.uint8)),
    "torch state of ones": with_random(torch=torch.full_like(torch.get_rng_state(), 255)),
    "torch state of floats": with_random(torch=torch.zeros(5056)),
    "no generators": lambda: {"random": {}},
    "nothing": dict,
    "a list": lambda: [1],
    "a number": lambda: 7,
    "another part": lambda: {"random": capture_random(), "x\n\x1b[2J": 1},
    "a part that is a number": lambda: {"random": capture_random(), 7: 1},
}


@pytest.mark.parametrize("item", ITEMS)
def test_a_hostile_item_raises_our_error(item: str) -> None:
    """A hostile item raises ReplicatedCkptError with a printable message. The process and its generators keep working."""
    raw = pack(ITEMS[item](), NAME)
    before = random.getstate()
    try:
        with pytest.raises(ReplicatedCkptError) as caught:
            RankState().load_state_dict({NAME: raw})
    finally:
        random.setstate(before)
    assert caught.value.message.isprintable()
    assert np.random.rand(700).max() <= 1
    assert torch.rand(700).max() <= 1


@pytest.mark.parametrize("raw", [b"", b"x", b"PK\x03\x04", bytes(1000)])
def test_bytes_that_are_no_item_raise_our_error(raw: bytes) -> None:
    """Bytes that `torch.save` did not write raise ReplicatedCkptError, not an error of torch."""
    with pytest.raises(ReplicatedCkptError):
        RankState().load_state_dict({NAME: raw})


def test_a_loader_checks_its_generator_states() -> None:
    """A loader checks the generator states from an epoch's start like a rank's own item."""
    loader = ReplayedLoader(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8))))
    next(iter(loader))
    state = loader.state_dict()
    state["start"]["asked"]["numpy"] = at(MANY)
    loader.load_state_dict(state)
    with pytest.raises(ReplicatedCkptError):
        next(iter(loader))
    assert np.random.rand(700).max() <= 1
