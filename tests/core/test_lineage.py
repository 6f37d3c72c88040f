"""Lineages: which run a save continues, and the order of saves of several runs."""

import pytest

from replicated_ckpt.core.inventory import Holding, lineages_found, saves_found
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import (
    History,
    Version,
    histories_from_json,
    histories_of,
    merge_histories,
    newest_lineage,
)

MAIN, OTHER = "a" * 16, "b" * 16


def holding(node: str, checkpoint_id: str, sequence: int, lineage: str, created: float) -> Holding:
    save_id = f"{sequence:031x}{lineage[:1] or '0'}"
    return Holding(node, checkpoint_id, save_id, sequence, True, created_unix_s=created, lineage=lineage)


def test_the_run_that_was_saved_last_comes_first_whatever_its_sequences() -> None:
    """The run with the latest clock comes first, although another run has higher sequences."""
    main = [holding("n0", f"step-{n}", n, MAIN, 1000.0 + n) for n in (1, 2, 3)]
    foreign = [holding("n2", f"old-{n}", 10 + n, OTHER, 10.0 + n) for n in (1, 2)]
    saves = saves_found([*foreign, *main])
    assert [save.checkpoint_id for save in saves] == ["step-3", "step-2", "step-1", "old-2", "old-1"]
    found = lineages_found(saves)
    assert [(each.lineage, each.newest_id, each.nodes) for each in found] == [
        (MAIN, "step-3", ("n0",)),
        (OTHER, "old-2", ("n2",)),
    ]


def test_within_a_run_the_clock_decides_only_between_equal_sequences() -> None:
    """Within a run, sequences decide. The clock decides only between equal ones."""
    saves = saves_found([holding("n0", "step-1", 1, MAIN, 5000.0), holding("n0", "step-2", 2, MAIN, 10.0)])
    assert [save.checkpoint_id for save in saves] == ["step-2", "step-1"]
    assert not Version(MAIN, 9, 9.0, "x").is_newer_than(Version(OTHER, 1, 1.0, "y"))


def test_a_save_continues_the_lineage_that_was_saved_last() -> None:
    """A save continues the newest lineage that a node holds. A lineage known only by report raises the sequence, but is
    not continued.
    """
    held = histories_of([Version(MAIN, 3, 100.0, "x"), Version(MAIN, 2, 300.0, "y"), Version(OTHER, 9, 200.0, "z")])
    assert held == {MAIN: History(3, 300.0), OTHER: History(9, 200.0)}
    told = merge_histories([held, {MAIN: History(7)}, {"c" * 16: History(50)}])
    assert told[MAIN] == History(7, 300.0)
    assert newest_lineage(told) == MAIN
    assert newest_lineage({MAIN: History(7)}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"x": {"sequence": 1, "created_unix_s": 1}},
        {MAIN: {"sequence": -1, "created_unix_s": 1}},
        {MAIN: {"sequence": SEQUENCE_FLOOR_MAX + 1, "created_unix_s": 1}},
        {MAIN: {"sequence": "1", "created_unix_s": 1}},
        {MAIN: {"sequence": 1}},
        {MAIN: {"sequence": 1, "created_unix_s": -1.0}},
        {MAIN: 3},
        [1],
    ],
)
def test_lineages_from_a_peer_are_validated(fields: object) -> None:
    """A peer's invalid lineages raise, and give no sequence."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        histories_from_json(fields)  # type: ignore[arg-type]
