"""The repair plan, of looks with something missing: a node given up, an unknown manifest, metadata that is nowhere."""

from dataclasses import replace

from replicated_ckpt.core.upkeep.remains import Remains
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan
from tests.core.upkeep.test_repair import BOTH, PAIR, copies, holding, manifest, shard

UP, ASSUMED, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE
FULL = NodeView("a", UP, (holding("a", PAIR, *BOTH),))


def test_what_a_node_held_that_was_given_up_counts_no_more() -> None:
    """Its last answer is still in the view: a blank node gets the copies, and is no source that waits for it."""
    gone = NodeView("b", GONE, (holding("b", PAIR, *BOTH),))
    plan = plan_repair({PAIR.save_id: PAIR}, [FULL, gone, NodeView("c", UP, ())])
    assert copies(plan) == [(shard(0), "c", ("a",)), (shard(1), "c", ("a",))]
    alone = plan_repair({PAIR.save_id: PAIR}, [NodeView("a", UP, (holding("a", PAIR, shard(0)),)), gone])
    assert [(short.shard, short.is_lost) for short in alone.short] == [(shard(1), True)]


def test_a_save_whose_manifest_was_not_read_is_passed_over() -> None:
    """A node holds one that this look has no manifest of, whether it goes or stays: the others are planned."""
    unknown = manifest(5, {shard(0): ("a",)})
    views = [
        NodeView("a", UP, (holding("a", PAIR, *BOTH), replace(holding("a", unknown), checkpoint_id="step-9"))),
        NodeView("b", UP, (holding("b", PAIR, shard(0)),)),
    ]
    for going in ((), (unknown.save_id,)):
        plan = plan_repair({PAIR.save_id: PAIR}, views, going=going)
        assert copies(plan) == [(shard(1), "b", ("a",))]


def test_metadata_that_no_node_has_is_lost_though_every_shard_is_intact() -> None:
    """Without it nothing loads: it is named, with the nodes of the save that may bring it back."""
    views = [NodeView(node, UP, (holding(node, PAIR, *BOTH, has_metadata=False),)) for node in "ab"]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
    assert plan.actions == ()
    assert [(lost.shard, lost.owner, lost.have) for lost in plan.lost] == [(".metadata", "every node of the save", 0)]
    silent = plan_repair({PAIR.save_id: PAIR}, [views[0], NodeView("b", ASSUMED, None)])
    assert silent.lost == ()
    assert [(short.shard, short.waits_for) for short in silent.short] == [(".metadata", ("b (host-b)",))]


def test_a_damaged_surplus_copy_that_cannot_be_mended_now_is_said() -> None:
    """As many as are wanted lie on nodes that do not answer; `verify` of this node finds the bad one all the same."""
    of_others = manifest(1, {shard(0): ("a", "c")})
    bad = replace(holding("b", of_others, shard(0)), damaged=(shard(0),))
    views = [NodeView("a", ASSUMED, None), NodeView("b", UP, (bad,)), NodeView("c", ASSUMED, None)]
    plan = plan_repair({of_others.save_id: of_others}, views)
    assert plan.copy == ()
    assert [(short.shard, short.have, short.is_lost) for short in plan.short] == [(shard(0), 2, False)]


def test_a_version_that_was_replaced_has_no_name() -> None:
    """A node keeps an older version aside: it is not taken for the one that has the name there, in any order."""
    newer = replace(PAIR, save_id=f"{2:032x}", sequence=2)
    has_name, aside = holding("b", newer, *BOTH), replace(holding("b", PAIR, *BOTH), is_replaced=True)
    for held in ((has_name, aside), (aside, has_name)):
        views = [NodeView("a", UP, (holding("a", newer, *BOTH),)), NodeView("b", UP, held)]
        assert plan_repair({of.save_id: of for of in (PAIR, newer)}, views) == RepairPlan()


def test_files_of_others_alone_are_no_checkpoint() -> None:
    """A directory of stock's without anything of ours under that name is for adoption, not for repair."""
    stock = Remains("b", "step-5", False, {shard(0): 100}, {})
    views = [FULL, NodeView("b", UP, (holding("b", PAIR, *BOTH),), remains=(stock,))]
    assert plan_repair({PAIR.save_id: PAIR}, views) == RepairPlan()
