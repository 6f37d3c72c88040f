"""A load that does not load all saved entries gives one warning with their prefixes, unless the user expects a partial
load.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.load.load_attempt import count_prefixes
from replicated_ckpt.errors import ReplicatedCkptWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def trained() -> dict[str, Any]:
    """A model and an Adam that has made a step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "none": torch.zeros(0, 4)}


def untrained() -> dict[str, Any]:
    """A model and an Adam that has made no step: its `state` is empty."""
    model = torch.nn.Linear(3, 2)
    return {"model": model.state_dict(), "optimizer": torch.optim.Adam(model.parameters()).state_dict()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(trained(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path / "root"))
    return tmp_path / "root"


def told_by(load: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [str(one.message) for one in caught if one.category is ReplicatedCkptWarning]


def load(root: Path, state: dict[str, Any], **options: Any) -> list[str]:
    reader = ReplicatedReader(root, **options)
    return told_by(lambda: dcp.load(state, checkpoint_id="step-1", storage_reader=reader))


def test_a_new_optimizer_that_restores_nothing_is_warned_of(saved: Path) -> None:
    """A new Adam has no momentum entries to load: one warning gives the prefix, the number of entries and the remedy."""
    [told] = load(saved, untrained())
    assert "does not load 6 of " in told
    assert " saved entries, under 'optimizer.state' (6)." in told
    assert "'step-1'" in told
    assert "get_state_dict" in told
    assert "expect_partial=True" in told


def test_a_load_of_all_is_silent(saved: Path) -> None:
    """A load of all entries gives no warning, also where DCP plans no read for an empty tensor."""
    assert load(saved, trained()) == []


def test_an_expected_partial_load_is_silent(saved: Path) -> None:
    """`expect_partial` of the reader or the manager suppresses the warning."""
    part = {"model": torch.nn.Linear(3, 2).state_dict()}
    assert load(saved, part, expect_partial=True) == []
    [told] = load(saved, part)
    assert "under 'optimizer' (" in told
    for is_meant in (True, False):
        with CheckpointManager(saved, expect_partial=is_meant) as manager:
            assert len(told_by(partial(manager.restore_latest, part))) == (0 if is_meant else 1)


def test_many_prefixes_are_cut_short(tmp_path: Path) -> None:
    """The warning lists eight prefixes, those with the most entries first, and counts the rest."""
    state: dict[str, Any] = {f"part-{number:02}": torch.ones(1) for number in range(20)}
    state["layers"] = {str(number): torch.ones(1) for number in range(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state | {"kept": torch.ones(1)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path))
    [told] = load(tmp_path, {"kept": torch.ones(1)})
    assert "under 'layers' (3), 'part-00' (1), 'part-01' (1)," in told
    assert "'part-06' (1), and 13 other prefixes." in told


@pytest.mark.parametrize(
    ("not_loaded", "asked", "counts"),
    [
        (["a.b.c", "a.b.d", "e.f"], ["a.x"], {"a.b": 2, "e": 1}),
        (["a", "b"], [], {"a": 1, "b": 1}),
        (["a"], ["a.b"], {"a": 1}),
        (["a.b.c"], ["a.b"], {"a.b.c": 1}),
        (["ab.c"], ["a.c"], {"ab": 1}),
        ([".a"], ["a"], {"": 1}),
    ],
)
def test_a_prefix_is_the_shortest_without_a_request(
    not_loaded: list[str], asked: list[str], counts: dict[str, int]
) -> None:
    """Entries are grouped by the shortest prefix under which the load asks for nothing."""
    assert count_prefixes(not_loaded, asked) == counts
