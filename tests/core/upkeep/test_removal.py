"""Removal by hand: `find_last_good` recognizes the last good checkpoint of a run."""

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


def test_the_last_complete_checkpoint_of_a_run_is_the_last_good_one() -> None:
    """If a complete checkpoint stays, nothing is refused. Otherwise every chosen checkpoint that may be complete is
    refused.
    """
    saves = [save(1), save(2), save(3, whole=False)]
    assert find_last_good(saves, {"a1"}) == ()
    assert find_last_good(saves, {"a1", "a2"}) == ("run/step-1", "run/step-2")
    assert find_last_good(saves, {"a1", "a2", "a3"}) == ("run/step-1", "run/step-2", "run/step-3")


def test_another_runs_checkpoint_does_not_count() -> None:
    """A remaining checkpoint of another lineage or directory does not count for this run."""
    assert find_last_good([save(1), save(2, lineage="b")], {"a1"}) == ("run/step-1",)
    assert find_last_good([save(1), save(2, scope="")], {"a1"}) == ("run/step-1",)


def test_a_lost_checkpoint_may_be_removed_and_a_silent_one_may_be_good() -> None:
    """A checkpoint with a lost file is not good. A checkpoint whose files were not seen may be."""
    assert find_last_good([save(1, whole=False, lost=True)], {"a1"}) == ()
    assert find_last_good([save(1, whole=False)], {"a1"}) == ("run/step-1",)


def test_prune_goes_by_the_rule_of_retention_in_each_run() -> None:
    """In each run the newest complete checkpoints stay, with all newer ones and the multiples of `keep_every`."""
    saves = [save(number) for number in (1, 2, 3, 4)] + [save(5, whole=False), save(1, lineage="b")]
    going = {verdict.save_id for verdict in plan_prune(saves, Retention(keep_last=2)) if not verdict.is_kept}
    assert going == {"a1", "a2"}
    going = {v.save_id for v in plan_prune(saves, Retention(keep_last=1, keep_every=2)) if not v.is_kept}
    assert going == {"a1", "a3"}


def test_only_answering_nodes_report_removals() -> None:
    """Only answering nodes' reports of removals count, so a silent node's does not stop repairs."""
    ids = "1" * 32, "2" * 32
    views = [
        NodeView("a", Presence.UP, (), node_report=NodeReport(removed=frozenset(ids[:1]))),
        NodeView("b", Presence.ASSUMED, (), node_report=NodeReport(removed=frozenset(ids[1:]))),
    ]
    assert find_removed(views) == frozenset(ids[:1])
    said = NodeReport(removed=frozenset(ids))
    assert NodeReport.from_json(said.to_json()) == said


def test_an_older_version_does_not_spread_while_a_node_has_the_removed_one() -> None:
    """One node removed a version, another still has it, and a third has the version before: neither version is copied."""
    old, new = (manifest(number, {shard(0): ("a", "b", "c")}) for number in (1, 2))
    views = [
        NodeView("a", Presence.UP, (), node_report=NodeReport(removed=frozenset({new.save_id}))),
        NodeView("b", Presence.UP, (holding("b", new, shard(0)),)),
        NodeView("c", Presence.UP, (holding("c", old, shard(0)),)),
    ]
    assert find_removed(views) == {old.save_id, new.save_id}
    assert plan_repair({one.save_id: one for one in (old, new)}, views, going=find_removed(views)).actions == ()
    assert find_removed([views[0], views[2]]) == {new.save_id}, (
        "no node has the newer version, which would show that the old one was replaced"
    )


def test_a_damaged_manifest_of_what_is_being_removed_is_not_missed() -> None:
    """A save is being removed, and one node's manifest of it is damaged: that manifest is neither restored nor reported
    as lost.

    Files that do not match the save are reported.
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
