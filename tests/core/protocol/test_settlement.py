"""The decisions of the commit protocol, one by one and over all small combinations."""

from collections.abc import Sequence
from itertools import product

import pytest

from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.protocol.settlement import (
    Answer,
    Fate,
    Settlement,
    is_without_a_name,
    may_be_dropped,
    may_publish,
    settle_staged,
)

NODES = ("a", "b", "c")
SILENT = None
NOT_PUBLISHED = {Answer.STAGED, Answer.ABSENT, Answer.ABORTED}


def settled(coordinator: str, answers: dict[str, Answer], *, is_worked_on: bool = False) -> Settlement:
    return settle_staged(own="a", nodes=NODES, coordinator=coordinator, is_worked_on=is_worked_on, answers=answers)


def version(sequence: int, save_id: str = "", lineage: str = "run", created: float = 1.0) -> Version:
    return Version(lineage, sequence, created, save_id or f"save{sequence}")


@pytest.mark.parametrize("coordinator", ["", "a", "b"])
@pytest.mark.parametrize("is_worked_on", [False, True])
def test_no_staged_save_is_dropped_that_a_silent_node_may_have_published(coordinator: str, is_worked_on: bool) -> None:
    """Over all answers of two nodes: a save is dropped only if neither can have published it."""
    for told in product([*Answer, SILENT], repeat=2):
        answers = {node: answer for node, answer in zip("bc", told, strict=True) if answer is not None}
        found = settled(coordinator, answers, is_worked_on=is_worked_on)
        if Answer.PUBLISHED in answers.values():
            assert found.fate is Fate.COMPLETE
            assert set(found.sources) == {node for node, answer in answers.items() if answer is Answer.PUBLISHED}
        if found.fate is Fate.DROP:
            knows = coordinator == "a" or Answer.ABORTED in answers.values()
            assert knows or {answers.get("b"), answers.get("c")} <= NOT_PUBLISHED
            assert Answer.PUBLISHED not in answers.values()
            assert knows or Answer.WORKING not in answers.values()
            assert not is_worked_on
        if found.fate is Fate.IN_DOUBT:
            quiet = {node for node, answer in answers.items() if answer in NOT_PUBLISHED}
            assert set(found.waits_for) == {"b", "c"} - quiet != set()


def test_a_coordinator_that_aborted_settles_the_save() -> None:
    """The coordinator decides before any other node, so its `aborted` drops a save without other answers. Its `absent`
    does not, because its disk may have been restored.
    """
    assert settled("b", {"b": Answer.ABORTED}).fate is Fate.DROP
    assert settled("b", {"b": Answer.ABSENT}) == Settlement(Fate.IN_DOUBT, waits_for=("c",))
    assert settled("b", {"b": Answer.ABSENT, "c": Answer.ABSENT}).fate is Fate.DROP
    assert settled("a", {}).fate is Fate.DROP
    assert settled("b", {"c": Answer.ABSENT}) == Settlement(Fate.IN_DOUBT, waits_for=("b",))
    assert settled("b", {"c": Answer.ABORTED}).fate is Fate.DROP, "retention has removed the save there"
    assert settled("b", {"b": Answer.STAGED}) == Settlement(Fate.IN_DOUBT, waits_for=("c",))
    assert settled("b", {"b": Answer.WORKING, "c": Answer.ABSENT}).fate is Fate.WORKED_ON
    assert settled("b", {"b": Answer.DECIDED, "c": Answer.ABSENT}) == Settlement(Fate.IN_DOUBT, waits_for=("b",))


def test_within_a_lineage_the_newer_save_is_published() -> None:
    """Within a lineage, sequence, clock and id decide. Another lineage's version is replaced only if the save was
    opened over it.
    """
    assert may_publish(version(1), None, "")
    assert may_publish(version(2), version(1), "")
    assert may_publish(version(2), version(2), "")
    assert not may_publish(version(1), version(2), "save2")
    assert not may_publish(version(2, "x", created=1.0), version(2, "y", created=2.0), "")
    assert may_publish(version(1, lineage="other"), version(9), "save9")
    assert not may_publish(version(9, lineage="other"), version(1), "")
    assert not may_publish(version(9, lineage="other"), version(1), "save0")


def test_a_version_is_dropped_only_for_a_newer_complete_one() -> None:
    """A version is dropped only for a newer one seen complete, and for another lineage's only if that one is published."""
    assert not may_be_dropped(version(1), whole=[], published=version(2))
    assert not may_be_dropped(version(1), whole=[version(1)], published=version(2))
    assert not may_be_dropped(version(2), whole=[version(1)], published=version(3))
    assert may_be_dropped(version(1), whole=[version(2)], published=version(3))
    assert not may_be_dropped(version(2), whole=[version(1)], published=version(1))
    other = version(7, lineage="other")
    assert not may_be_dropped(version(1), whole=[other], published=version(2))
    assert may_be_dropped(version(1), whole=[other], published=other)


def test_a_decided_save_is_dropped_only_for_another_runs_newer_one() -> None:
    """A decided save that no node published is dropped only for another run's published, complete save that is not
    older by the clock.
    """
    ours, other = version(9, created=1.0), version(2, lineage="other", created=2.0)

    def may_be_deleted(
        published: Version | None, *, replaces: str = "", whole: Sequence[Version] = (other,), seen: bool = True
    ) -> bool:
        return is_without_a_name(ours, published=published, replaces=replaces, whole=whole, is_seen_nowhere=seen)

    assert may_be_deleted(other)
    assert not may_be_deleted(other, seen=False)
    assert not may_be_deleted(other, whole=[])
    assert not may_be_deleted(other, whole=[version(3, lineage="other")])
    assert not may_be_deleted(other, replaces="save2"), "the save may replace the published one"
    assert not may_be_deleted(None, whole=[other])
    own = version(10, created=2.0)
    assert not may_be_deleted(own, whole=[own]), "within one run the sequence decides"
    at_once, older = (version(2, lineage="other", created=created) for created in (ours.created_unix_s, 0.5))
    assert may_be_deleted(at_once, whole=[at_once]), "with equal clocks the published save stays"
    assert not may_be_deleted(older, whole=[older])
