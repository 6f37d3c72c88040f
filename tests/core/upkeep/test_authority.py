"""A node's authority: its own part of a plan, its actions for other nodes, and the policies that it follows."""

from dataclasses import replace

from replicated_ckpt import Retention
from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.protocol.seen_save import see_save
from replicated_ckpt.core.upkeep.policy import NODES, Policy, agree, confirm, merge_policies
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.repair_plan import (
    CopyShard,
    RepairPlan,
    RestoreManifest,
    SetAside,
    ShortShard,
    is_of_held_save,
    refuse_unplanned,
)
from replicated_ckpt.core.upkeep.retention import plan_retention

SAVE, OTHER = "1" * 32, "2" * 32
SHARD = "__0_0.distcp"
KEEP_TWO = Policy("", NODES, 5, Retention(keep_last=2))
KEEP_NINE = replace(KEEP_TWO, revision=6, retention=Retention(keep_last=9))


def restored(node: str, save_id: str = SAVE, checkpoint_id: str = "step-1") -> RestoreManifest:
    return RestoreManifest(node, checkpoint_id, save_id, ("c",))


def test_a_node_does_only_its_own_part_of_a_plan() -> None:
    """`of_node` has the actions of one node, and no short shards."""
    parts = {
        node: RepairPlan(
            (restored(node),),
            (CopyShard(node, "step-1", SAVE, SHARD, 100, ("c",)),),
            (SetAside(node, "step-1", SAVE, "__9_0.distcp"),),
        )
        for node in "ab"
    }
    short = (ShortShard("step-1", SAVE, SHARD, "node a", 2, 0),)
    both = (parts["a"], parts["b"])
    plan = RepairPlan(
        tuple(action for part in both for action in part.restore),
        tuple(action for part in both for action in part.copy),
        tuple(action for part in both for action in part.set_aside),
        short,
    )
    assert {node: plan.of_node(node) for node in "ab"} == parts
    assert plan.of_node("c") == RepairPlan()


def test_a_plan_concerns_the_files_that_it_names() -> None:
    """A plan concerns files to be copied, to be quarantined, or short, of that checkpoint."""
    plan = RepairPlan(
        copy=(CopyShard("a", "step-1", SAVE, "copied", 100, ("c",)),),
        set_aside=(SetAside("a", "step-1", SAVE, "aside"),),
        short=(ShortShard("step-1", SAVE, "short", "node a", 2, 1),),
    )
    assert all(plan.concerns("step-1", name) for name in ("copied", "aside", "short"))
    assert not plan.concerns("step-1", "other")
    assert not plan.concerns("step-2", "copied")


def test_a_requested_restore_needs_the_nodes_own_plan() -> None:
    """A peer's request to restore a save is refused unless this node's own plan has that save at that place."""
    asked = [restored("a"), restored("a", OTHER), restored("a", checkpoint_id="step-2"), restored("b")]
    assert refuse_unplanned(asked, [replace(asked[0], sources=("d",))]) == frozenset(asked[1:])
    assert refuse_unplanned(asked, []) == frozenset(asked)


def test_a_held_save_may_be_restored_again() -> None:
    """A peer may restore a save that the node already holds, under the same name."""
    held = [Holding("a", "step-1", SAVE, 1, True, {})]
    assert is_of_held_save(restored("a"), held)
    assert not is_of_held_save(restored("a", OTHER), held)
    assert not is_of_held_save(restored("a", checkpoint_id="step-2"), held)


def test_the_later_policy_counts_and_two_of_one_save_keep_everything() -> None:
    """The later policy wins in any order, separately for each tier, directory and run. Two of one revision keep
    everything.
    """
    for one, two in ((KEEP_TWO, KEEP_NINE), (KEEP_NINE, KEEP_TWO)):
        assert merge_policies(one, two) == KEEP_NINE
        assert agree([one, two, replace(one, scope="run")]) == (KEEP_NINE, replace(one, scope="run"))
    same_save = replace(KEEP_NINE, revision=KEEP_TWO.revision)
    assert merge_policies(KEEP_TWO, same_save).retention is None


def test_a_node_follows_only_policies_of_its_own_ranks() -> None:
    """A node follows a policy only if its own ranks have set the same retention there."""
    elsewhere = replace(KEEP_TWO, scope="run")
    assert confirm([KEEP_TWO, elsewhere], [KEEP_TWO]) == (KEEP_TWO,)
    assert confirm([KEEP_NINE], [KEEP_TWO]) == ()
    assert confirm([KEEP_TWO], []) == ()
    later = replace(KEEP_TWO, revision=9)
    assert confirm([later], [KEEP_TWO]) == (later,)


def test_a_save_without_shards_is_never_complete() -> None:
    """A manifest without shards, which a peer can easily forge, does not count as complete: no save is removed for it."""
    policy = Policy("", NODES, 1, Retention(keep_last=1), lineage="a" * 16)
    entry = {SHARD: ShardEntry(9, 1, 0, "a", ("a",))}
    node = (NodeEntry("a", "host", None, (0,)),)
    real, claimed = (
        Manifest(save_id, f"step-{number}", number, 1.0, 1, 1, 4, 1, node, shards, lineage="a" * 16)
        for number, save_id, shards in ((1, SAVE, entry), (2, OTHER, {}))
    )
    manifests = {SAVE: real, OTHER: claimed}
    held = [
        Holding.of_save(one, "a", one.checkpoint_id, has_metadata=True, sizes=one.shard_sizes)
        for one in manifests.values()
    ]
    view = NodeView("a", Presence.UP, tuple(held))
    assert plan_retention(manifests, [view], [policy]).removals == ()
    seen = {save.save_id: see_save(save, manifests[save.save_id], {"a"}, (), ()).is_whole for save in saves_found(held)}
    assert seen == {SAVE: True, OTHER: False}
