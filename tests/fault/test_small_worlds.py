"""The search of small worlds: a bounded part of it on every run, and proof that it finds what it should."""

import pytest

from replicated_ckpt.core.protocol.settlement import Answer, Fate
from tests.fault.small_worlds.mending import TWO_RUNS
from tests.fault.small_worlds.rules import OldRules, PackageRules
from tests.fault.small_worlds.search import Search
from tests.fault.small_worlds.world import PAIRS, RING, Layout, State, World, first

WORLDS = [
    pytest.param(RING, first(RING), id="ring"),
    pytest.param(RING, first(RING, adopting=1), id="adopting"),
    pytest.param(PAIRS, first(PAIRS), id="pairs"),
]
STATES_MAX = 6_000
AWAY = first(RING, away=2)
"""One node has the other run's version and was away when the new one was opened."""


@pytest.mark.parametrize("is_atomic", [True, False], ids=["asks-at-once", "asks-one-by-one"])
@pytest.mark.parametrize(("layout", "begin"), WORLDS)
def test_no_order_of_steps_loses_what_was_acknowledged(layout: Layout, begin: State, *, is_atomic: bool) -> None:
    """In every state that few steps lead to, what was acknowledged last loads once all nodes are back, or what is newer."""
    found = Search(World(layout, PackageRules(), is_atomic=is_atomic), STATES_MAX).run(begin)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX
    assert found.dropped > 0


@pytest.mark.parametrize("is_atomic", [True, False], ids=["asks-at-once", "asks-one-by-one"])
def test_a_save_over_another_runs_checkpoint_ends_the_same_way(*, is_atomic: bool) -> None:
    """Neither version is lost before the other is whole, and in the end no node keeps what was replaced, but one that was
    away: there it stays."""
    found = Search(World(RING, PackageRules(TWO_RUNS), is_atomic=is_atomic, away=2), STATES_MAX).run(AWAY)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX


@pytest.mark.parametrize(("layout", "begin"), [WORLDS[0], WORLDS[2]])
def test_any_one_disk_may_be_lost_at_any_moment(layout: Layout, begin: State) -> None:
    """In every state any one node may be lost with its disk: of what was acknowledged last and what is newer, one loads."""
    found = Search(World(layout, PackageRules()), STATES_MAX, loses_a_disk=True).run(begin)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX


@pytest.mark.parametrize(("layout", "begin"), [WORLDS[0], WORLDS[2]])
def test_with_the_rules_of_before_a_lost_disk_loses_what_was_acknowledged(layout: Layout, begin: State) -> None:
    """A node that removes what it replaces, and takes silence for an answer, and then the loss of one disk."""
    world = World(layout, OldRules(), is_atomic=True)
    found = Search(world, STATES_MAX, by_outcome_alone=True, loses_a_disk=True).run(begin)
    assert "the loss of node" in found.broken, found


class ForgetsWhatItReplaces(PackageRules):
    """A node does not know what it was opened over."""

    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool:
        del is_opened
        return super().may_publish(version, published, is_opened=False)


def test_a_save_must_know_what_it_replaces() -> None:
    """Without that no node publishes it over another run's."""
    found = Search(World(RING, ForgetsWhatItReplaces(TWO_RUNS), is_atomic=True, away=2), STATES_MAX).run(AWAY)
    assert found.broken, found


class TakesSilenceForNo(PackageRules):
    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        return OldRules().settle(own, count, is_worked_on=is_worked_on, answers=answers)


class RemovesWhatIsWorkedOn(PackageRules):
    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        del is_worked_on
        quiet: dict[int, Answer] = {
            node: Answer.STAGED if said is Answer.WORKING else said for node, said in answers.items()
        }
        return super().settle(own, count, is_worked_on=False, answers=quiet)


class TakesOblivionForNo(PackageRules):
    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        said: dict[int, Answer] = {
            node: Answer.ABORTED if answer is Answer.ABSENT else answer for node, answer in answers.items()
        }
        return super().settle(own, count, is_worked_on=is_worked_on, answers=said)


class ComparesNothing(PackageRules):
    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool:
        del version, published, is_opened
        return True


class DeletesWhatItReplaces(PackageRules):
    def keeps_replaced(self) -> bool:
        return False


class DropsWhatItReplacedAtOnce(PackageRules):
    def may_drop(self, old: int, whole: frozenset[int], published: int | None) -> bool:
        del whole
        return published is not None and old != published


@pytest.mark.parametrize(
    ("rules", "adopting", "broken"),
    [
        (TakesSilenceForNo(), None, "drops the new version"),
        (RemovesWhatIsWorkedOn(), None, "drops the new version"),
        (ComparesNothing(), 1, "is not done"),
        (DeletesWhatItReplaces(), None, "drops the old version"),
        (DropsWhatItReplacedAtOnce(), None, "drops the old version"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PackageRules) else "",
)
def test_every_rule_is_needed(rules: PackageRules, adopting: int | None, broken: str) -> None:
    """Without any one of the rules of the protocol an invariant breaks, and the search finds it within a few steps."""
    found = Search(World(RING, rules, is_atomic=True), STATES_MAX).run(first(RING, adopting=adopting))
    assert broken in found.broken, found


@pytest.mark.parametrize(("layout", "begin"), [WORLDS[0], WORLDS[2]])
def test_a_coordinators_disk_may_be_put_back_to_what_it_was_before_the_save(layout: Layout, begin: State) -> None:
    """Once it has decided, and one other node knows: no node drops what it has staged by the word of one that forgot."""
    world = World(layout, PackageRules(), is_atomic=True, may_go_back=True)
    for step in ("decide", "tell 1", "agent of 0 dies", "rank of 0 dies"):
        begin = dict(world.steps(begin))[step]
    found = Search(world, STATES_MAX).run(begin)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX
    world.rules = TakesOblivionForNo()
    found = Search(world, STATES_MAX).run(begin)
    assert "drops the new version" in found.broken, found


@pytest.mark.long
@pytest.mark.parametrize(("layout", "begin"), WORLDS[1:])  # in a ring, re-protection as it is now makes up for them
def test_the_rules_of_before_lose_what_was_acknowledged(layout: Layout, begin: State) -> None:
    """A node that takes silence for an answer, and the last to publish has the name: that loses what was acknowledged."""
    found = Search(World(layout, OldRules(), is_atomic=True), 20 * STATES_MAX, by_outcome_alone=True).run(begin)
    assert "is lost" in found.broken, found
