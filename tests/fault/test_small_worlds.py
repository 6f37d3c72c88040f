"""The search of small worlds: a bounded part of it in every run, and proof that the search detects broken rules."""

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
"""Node 2 has the other run's version, and was away when the new save was opened."""


@pytest.mark.parametrize("is_atomic", [True, False], ids=["asks-at-once", "asks-one-by-one"])
@pytest.mark.parametrize(("layout", "begin"), WORLDS)
def test_no_order_of_steps_loses_what_was_acknowledged(layout: Layout, begin: State, *, is_atomic: bool) -> None:
    """From every state within the bound, the checkpoint acknowledged last, or a newer one, loads once all nodes are
    back.
    """
    found = Search(World(layout, PackageRules(), is_atomic=is_atomic), STATES_MAX).run(begin)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX
    assert found.dropped > 0


@pytest.mark.parametrize("is_atomic", [True, False], ids=["asks-at-once", "asks-one-by-one"])
def test_a_save_over_another_runs_checkpoint_loses_neither_version(*, is_atomic: bool) -> None:
    """Neither version is lost before the other is complete. In the end only the node that was away keeps the replaced
    version.
    """
    found = Search(World(RING, PackageRules(TWO_RUNS), is_atomic=is_atomic, away=2), STATES_MAX).run(AWAY)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX


@pytest.mark.parametrize(("layout", "begin"), [WORLDS[0], WORLDS[2]])
def test_any_one_disk_may_be_lost_at_any_moment(layout: Layout, begin: State) -> None:
    """In every state, any one node may be lost with its disk: the version acknowledged last or a newer one still loads."""
    found = Search(World(layout, PackageRules()), STATES_MAX, loses_a_disk=True).run(begin)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX


@pytest.mark.parametrize(("layout", "begin"), [WORLDS[0], WORLDS[2]])
def test_under_the_old_rules_a_lost_disk_loses_what_was_acknowledged(layout: Layout, begin: State) -> None:
    """The old rules let a node delete the version that it replaces, and take silence for "not published". The search
    finds that the loss of one disk then loses the acknowledged checkpoint.
    """
    world = World(layout, OldRules(), is_atomic=True)
    found = Search(world, STATES_MAX, by_outcome_alone=True, loses_a_disk=True).run(begin)
    assert "the loss of node" in found.broken, found


class ForgetsReplacedVersion(PackageRules):
    """A node forgets which version the new save was opened over."""

    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool:
        del is_opened
        return super().may_publish(version, published, is_opened=False)


def test_a_save_must_know_what_it_replaces() -> None:
    """Otherwise no node publishes the save over another run's checkpoint."""
    found = Search(World(RING, ForgetsReplacedVersion(TWO_RUNS), is_atomic=True, away=2), STATES_MAX).run(AWAY)
    assert found.broken, found


class TakesSilenceForNotPublished(PackageRules):
    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        return OldRules().settle(own, count, is_worked_on=is_worked_on, answers=answers)


class DropsLockedSaves(PackageRules):
    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        del is_worked_on
        quiet: dict[int, Answer] = {
            node: Answer.STAGED if said is Answer.WORKING else said for node, said in answers.items()
        }
        return super().settle(own, count, is_worked_on=False, answers=quiet)


class TakesAbsentForAborted(PackageRules):
    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        said: dict[int, Answer] = {
            node: Answer.ABORTED if answer is Answer.ABSENT else answer for node, answer in answers.items()
        }
        return super().settle(own, count, is_worked_on=is_worked_on, answers=said)


class PublishesWithoutComparing(PackageRules):
    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool:
        del version, published, is_opened
        return True


class DeletesReplacedVersions(PackageRules):
    def keeps_replaced(self) -> bool:
        return False


class DropsReplacedVersionsAtOnce(PackageRules):
    def may_drop(self, old: int, whole: frozenset[int], published: int | None) -> bool:
        del whole
        return published is not None and old != published


@pytest.mark.parametrize(
    ("rules", "adopting", "broken"),
    [
        (TakesSilenceForNotPublished(), None, "drops the new version"),
        (DropsLockedSaves(), None, "drops the new version"),
        (PublishesWithoutComparing(), 1, "is not done"),
        (DeletesReplacedVersions(), None, "drops the old version"),
        (DropsReplacedVersionsAtOnce(), None, "drops the old version"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PackageRules) else "",
)
def test_every_rule_is_needed(rules: PackageRules, adopting: int | None, broken: str) -> None:
    """If any one rule of the protocol is removed, an invariant breaks, and the search finds that within a few steps."""
    found = Search(World(RING, rules, is_atomic=True), STATES_MAX).run(first(RING, adopting=adopting))
    assert broken in found.broken, found


@pytest.mark.parametrize(("layout", "begin"), [WORLDS[0], WORLDS[2]])
def test_a_coordinators_disk_may_be_restored_to_its_state_before_the_save(layout: Layout, begin: State) -> None:
    """The coordinator has decided, and one other node has the decision. If the coordinator's disk is then restored to
    its state before the save, no node drops its staged part because the coordinator forgot the save.
    """
    world = World(layout, PackageRules(), is_atomic=True, may_go_back=True)
    for step in ("decide", "tell 1", "agent of 0 dies", "rank of 0 dies"):
        begin = dict(world.steps(begin))[step]
    found = Search(world, STATES_MAX).run(begin)
    assert not found.broken, (found.broken, found.trace)
    assert found.states >= STATES_MAX
    world.rules = TakesAbsentForAborted()
    found = Search(world, STATES_MAX).run(begin)
    assert "drops the new version" in found.broken, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "begin"), WORLDS[1:]
)  # in a ring, today's re-protection compensates for the old rules
def test_the_old_rules_lose_what_was_acknowledged(layout: Layout, begin: State) -> None:
    """The old rules take silence for "not published", and let the last node to publish win the name. The search finds
    that they lose the acknowledged checkpoint.
    """
    found = Search(World(layout, OldRules(), is_atomic=True), 20 * STATES_MAX, by_outcome_alone=True).run(begin)
    assert "is lost" in found.broken, found
