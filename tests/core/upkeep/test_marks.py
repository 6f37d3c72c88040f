"""Marks on checkpoints: merging those of several nodes, refusing invalid ones, and no removal because of a mark."""

import json
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.upkeep.marks import (
    NO_MARKS,
    REJECTIONS_MAX,
    RESTORES_MAX,
    Marks,
    Restores,
    merge_marks,
    next_revision,
)
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.core.upkeep.retention import Candidate, Removable, find_last_good, judge

A, B = "a" * 32, "b" * 32
RUN = "1" * 16


def counted(newest: int, **count_by_save: int) -> Marks:
    return Marks({}, {RUN: Restores(newest, {name * 32: count for name, count in count_by_save.items()})})


def test_marks_of_several_nodes_are_merged() -> None:
    """Merging in any order gives the last change of each rejection, and the largest counts since the latest save."""
    told = [
        replace(counted(7, a=1, b=2), rejections={A: 1, B: 2}),
        replace(counted(7, a=3), rejections={A: 2}),
        replace(counted(6, a=9), rejections={B: 3}),
        NO_MARKS,
    ]
    for order in permutations(told):
        found = merge_marks(order)
        assert not found.is_rejected(A)
        assert found.is_rejected(B)
        assert [found.count_restores(RUN, 7, save_id) for save_id in (A, B)] == [3, 2]
        assert found.count_restores(RUN, 8, A) == 0, "a later save starts a new count"
        assert found.count_restores("", 7, A) == 0


def test_a_change_raises_the_revision() -> None:
    """A rejection and its end each raise the revision. Setting the current state again does not."""
    assert [next_revision(number, is_rejected=True) for number in (0, 1, 2, 3)] == [1, 1, 3, 3]
    assert [next_revision(number, is_rejected=False) for number in (0, 1, 2, 3)] == [0, 2, 2, 4]
    with pytest.raises(ValueError, match="no number is left"):
        next_revision(1 << 53, is_rejected=True)


@pytest.mark.parametrize(
    "told",
    [
        {"rejections": {A: 0}},
        {"rejections": {A: -1}},
        {"rejections": {A: 1 << 60}},
        {"rejections": {A: 1.5}},
        {"rejections": {"../x": 1}},
        {"rejections": [A]},
        {"restores": {"run": {"newest": 1, "count_by_save": {}}}},
        {"restores": {RUN: {"newest": -1, "count_by_save": {}}}},
        {"restores": {RUN: {"newest": SEQUENCE_FLOOR_MAX + 1, "count_by_save": {}}}},
        {"restores": {RUN: {"newest": 1, "count_by_save": {A: RESTORES_MAX + 1}}}},
        {"restores": {RUN: {"newest": 1, "count_by_save": {"x": 1}}}},
        {"restores": {RUN: 7}},
    ],
)
def test_invalid_marks_are_refused(told: dict[str, Any]) -> None:
    """Invalid marks from a peer or a damaged file are refused as a whole."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Marks.from_json({"rejections": {}, "restores": {}, **told})


def test_marks_decode_within_bounds() -> None:
    """Marks in a node's report decode unchanged. Of too many, the newest are kept. A report without marks has none."""
    marks = replace(counted(7, a=1), rejections={A: 1})
    assert NodeReport.from_json(json.loads(json.dumps(NodeReport(marks=marks).to_json()))).marks == marks
    assert NodeReport.from_json({}).marks == NO_MARKS
    many = {f"{number:032x}": 1 for number in range(REJECTIONS_MAX + 5)}
    found = Marks.from_json({"rejections": many, "restores": {}})
    assert list(found.rejections) == list(many)[5:]


def test_a_rejected_checkpoint_does_not_count() -> None:
    """A rejected checkpoint does not count for `keep_last`, as the best, or as the newest with all copies. A rejection
    never removes more checkpoints.
    """
    saves = [
        Candidate(
            f"step-{number}", f"{number:032x}", number, is_protected=number < 6, metrics={"loss": float(9 - number)}
        )
        for number in range(1, 8)
    ]
    policy = Retention(keep_last=2, keep_best="loss")

    def kept(rejected: tuple[int, ...]) -> set[int]:
        marked = [replace(save, is_rejected=save.sequence in rejected) for save in saves]
        return {verdict.sequence for verdict in judge(marked, policy) if verdict.is_kept}

    assert kept(()) == {5, 6, 7}
    assert kept((7,)) == {5, 6, 7}
    assert kept((6, 7)) == {4, 5, 6, 7}
    assert kept((5, 6)) == {4, 5, 6, 7}
    assert kept((2, 3, 4, 5, 6, 7)) == {1, 2, 3, 4, 5, 6, 7}
    for count in range(len(saves) + 1):
        for rejected in combinations(range(1, 8), count):
            assert kept(rejected) >= kept(())


def test_the_last_checkpoint_that_is_not_rejected_is_the_last_good_one() -> None:
    """`rm` refuses the only checkpoint that is not rejected, although a rejected one would stay."""
    good, bad = (Candidate(f"step-{number}", f"{number:032x}", number) for number in (1, 2))
    saves = [Removable(good, RUN), Removable(replace(bad, is_rejected=True), RUN)]
    assert find_last_good(saves, {good.save_id}) == ("step-1",)
    assert find_last_good(saves, {bad.save_id}) == ()
