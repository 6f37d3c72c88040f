"""Removal by hand: the last good checkpoint of a run is recognized, whatever else lies there."""

from dataclasses import replace

from replicated_ckpt.config import Retention
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.retention import Candidate, Removable, find_last_good, find_removed, plan_prune
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from tests.core.upkeep.test_repair import holding, manifest, shard


def save(number: int, *, lineage: str = "a", scope: str = "run/", whole: bool = True, lost: bool = False) -> Removable:
    candidate = Candidate(f"{scope}step-{number}", f"{lineage}{number}", number, is_whole=whole, is_protected=whole)
    return Removable(candidate, lineage, is_lost=lost)


def test_the_last_whole_one_of_a_run_is_the_last_good_one() -> None:
    """With a whole one left nothing is refused; without, each chosen one is that may be whole."""
    saves = [save(1), save(2), save(3, whole=False)]
    assert find_last_good(saves, {"a1"}) == ()
    assert find_last_good(saves, {"a1", "a2"}) == ("run/step-1", "run/step-2")
    assert find_last_good(saves, {"a1", "a2", "a3"}) == ("run/step-1", "run/step-2", "run/step-3")


def test_another_run_takes_the_place_of_none() -> None:
    """Neither another lineage's checkpoint nor one in another directory."""
    assert find_last_good([save(1), save(2, lineage="b")], {"a1"}) == ("run/step-1",)
    assert find_last_good([save(1), save(2, scope="")], {"a1"}) == ("run/step-1",)


def test_what_is_lost_may_go_and_what_is_silent_may_be_good() -> None:
    """A checkpoint with files that no node can hold is no good one; one with files that were not seen may be."""
    assert find_last_good([save(1, whole=False, lost=True)], {"a1"}) == ()
    assert find_last_good([save(1, whole=False)], {"a1"}) == ("run/step-1",)


def test_prune_goes_by_the_rule_of_retention_in_each_run() -> None:
    """The newest whole ones of each run stay, with those that are not older; a multiple of keep_every does."""
    saves = [save(number) for number in (1, 2, 3, 4)] + [save(5, whole=False), save(1, lineage="b")]
    going = {verdict.save_id for verdict in plan_prune(saves, Retention(keep_last=2)) if not verdict.is_kept}
    assert going == {"a1", "a2"}
    going = {v.save_id for v in plan_prune(saves, Retention(keep_last=1, keep_every=2)) if not v.is_kept}
    assert going == {"a1", "a3"}


def test_only_nodes_that_answer_say_what_was_removed() -> None:
    """What a silent node said once does not keep copies from being made."""
    ids = "1" * 32, "2" * 32
    views = [
        NodeView("a", Presence.UP, (), node_report=NodeReport(removed=frozenset(ids[:1]))),
        NodeView("b", Presence.ASSUMED, (), node_report=NodeReport(removed=frozenset(ids[1:]))),
    ]
    assert find_removed(views) == frozenset(ids[:1])
    said = NodeReport(removed=frozenset(ids))
    assert NodeReport.from_json(said.to_json()) == said


def test_an_older_version_does_not_spread_while_a_node_has_the_removed_one() -> None:
    """One node removed what replaced it, one has that still, one has the old one alone: none is copied."""
    old, new = (manifest(number, {shard(0): ("a", "b", "c")}) for number in (1, 2))
    views = [
        NodeView("a", Presence.UP, (), node_report=NodeReport(removed=frozenset({new.save_id}))),
        NodeView("b", Presence.UP, (holding("b", new, shard(0)),)),
        NodeView("c", Presence.UP, (holding("c", old, shard(0)),)),
    ]
    assert find_removed(views) == {old.save_id, new.save_id}
    assert plan_repair({one.save_id: one for one in (old, new)}, views, going=find_removed(views)).actions == ()
    assert find_removed([views[0], views[2]]) == {new.save_id}, "nothing tells that the old one was replaced"


def test_a_damaged_manifest_of_what_is_being_removed_is_not_missed() -> None:
    """One node has removed it, one has it still, and on one its manifest is damaged, which no node restores any more.

    It was said to be lost, on no node that answers, until it was removed on all nodes. Of other files that is true.
    """
    of = manifest(1, {shard(0): ("b", "c")})
    entry = of.shards[shard(0)]
    own = UnclaimedFiles("c", "step-1", is_ours=True, sizes={shard(0): 100}, crcs={shard(0): entry.crc32c})
    for unclaimed, is_complete in ((own, True), (replace(own, crcs={shard(0): entry.crc32c + 1}), False)):
        views = [
            NodeView("a", Presence.UP, (), node_report=NodeReport(removed=frozenset({of.save_id}))),
            NodeView("b", Presence.UP, (holding("b", of, shard(0)),)),
            NodeView("c", Presence.UP, (), unclaimed=(unclaimed,)),
        ]
        plan = plan_repair({of.save_id: of}, views, going=find_removed(views))
        assert (plan.actions, plan.is_complete) == ((), is_complete)
