"""The repair plan with incomplete information: a lost node, an unread manifest, missing metadata."""

from dataclasses import replace

from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from tests.core.upkeep.test_repair import BOTH, PAIR, copies, holding, manifest, shard

UP, ASSUMED, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE
FULL = NodeView("a", UP, (holding("a", PAIR, *BOTH),))


def test_holdings_of_a_lost_node_do_not_count() -> None:
    """The last known holdings of a lost node do not count: a blank node gets copies, without that node as a source."""
    gone = NodeView("b", GONE, (holding("b", PAIR, *BOTH),))
    plan = plan_repair({PAIR.save_id: PAIR}, [FULL, gone, NodeView("c", UP, ())])
    assert copies(plan) == [(shard(0), "c", ("a",)), (shard(1), "c", ("a",))]
    alone = plan_repair({PAIR.save_id: PAIR}, [NodeView("a", UP, (holding("a", PAIR, shard(0)),)), gone])
    assert [(short.shard, short.is_lost) for short in alone.short] == [(shard(1), True)]


def test_a_save_without_a_read_manifest_is_skipped() -> None:
    """A held save without a read manifest is skipped, and the others are planned."""
    unknown = manifest(5, {shard(0): ("a",)})
    views = [
        NodeView("a", UP, (holding("a", PAIR, *BOTH), replace(holding("a", unknown), checkpoint_id="step-9"))),
        NodeView("b", UP, (holding("b", PAIR, shard(0)),)),
    ]
    for going in ((), (unknown.save_id,)):
        plan = plan_repair({PAIR.save_id: PAIR}, views, going=going)
        assert copies(plan) == [(shard(1), "b", ("a",))]


def test_metadata_that_no_node_has_is_lost_though_every_shard_is_intact() -> None:
    """Metadata that no node has is reported as lost, or, with a silent node, as waiting for that node."""
    views = [NodeView(node, UP, (holding(node, PAIR, *BOTH, has_metadata=False),)) for node in "ab"]
    plan = plan_repair({PAIR.save_id: PAIR}, [*views, NodeView("blank", UP, ())])
    assert plan.actions == ()
    assert [(lost.shard, lost.owner, lost.have) for lost in plan.lost] == [(".metadata", "every node of the save", 0)]
    silent = plan_repair({PAIR.save_id: PAIR}, [views[0], NodeView("b", ASSUMED, None)])
    assert silent.lost == ()
    assert [(short.shard, short.waits_for) for short in silent.short] == [(".metadata", ("b (host-b)",))]


def test_a_damaged_extra_copy_that_cannot_be_repaired_now_is_reported() -> None:
    """A damaged extra copy is reported as short while the intact ones are on silent nodes."""
    of_others = manifest(1, {shard(0): ("a", "c")})
    bad = replace(holding("b", of_others, shard(0)), damaged=(shard(0),))
    views = [NodeView("a", ASSUMED, None), NodeView("b", UP, (bad,)), NodeView("c", ASSUMED, None)]
    plan = plan_repair({of_others.save_id: of_others}, views)
    assert plan.copy == ()
    assert [(short.shard, short.have, short.is_lost) for short in plan.short] == [(shard(0), 2, False)]


def test_a_replaced_version_is_not_the_published_one() -> None:
    """A node's replaced version is not mistaken for its published one, in either order of the holdings."""
    newer = replace(PAIR, save_id=f"{2:032x}", sequence=2)
    has_name, aside = holding("b", newer, *BOTH), replace(holding("b", PAIR, *BOTH), is_replaced=True)
    for held in ((has_name, aside), (aside, has_name)):
        views = [NodeView("a", UP, (holding("a", newer, *BOTH),)), NodeView("b", UP, held)]
        assert plan_repair({of.save_id: of for of in (PAIR, newer)}, views) == RepairPlan()


def test_a_replaced_version_takes_a_free_name_if_another_node_can_give_it() -> None:
    """After the newer version was retired, a replaced version is published again if another node has it published.
    Otherwise it is not.
    """
    aside = [NodeView(node, UP, (replace(holding(node, PAIR, *BOTH), is_replaced=True),)) for node in "ab"]
    plan = plan_repair({PAIR.save_id: PAIR}, [FULL, aside[1]])
    assert [(action.node_id, action.save_id, action.sources) for action in plan.restore] == [
        ("b", PAIR.save_id, ("a",))
    ]
    assert copies(plan) == []
    alone = plan_repair({PAIR.save_id: replace(PAIR, copies=1)}, aside[:1])
    assert alone == RepairPlan()


def test_stock_torchs_files_alone_are_ignored() -> None:
    """Repair ignores a directory with only stock torch's files."""
    stock = UnclaimedFiles("b", "step-5", False, {shard(0): 100}, {})
    views = [FULL, NodeView("b", UP, (holding("b", PAIR, *BOTH),), unclaimed=(stock,))]
    assert plan_repair({PAIR.save_id: PAIR}, views) == RepairPlan()


def test_a_silent_node_counts_for_what_it_was_seen_to_hold() -> None:
    """A silent node counts with its last known holdings: only the shard that those lacked is copied."""
    silent = NodeView("b", ASSUMED, (holding("b", PAIR, shard(0)),))
    plan = plan_repair({PAIR.save_id: PAIR}, [FULL, silent, NodeView("c", UP, (holding("c", PAIR),))])
    assert copies(plan) == [(shard(1), "c", ("a",))]


def test_a_blank_node_gets_the_save_that_may_be_complete() -> None:
    """A blank node gets the older save if the newer one has lost a shard for good."""
    torn = manifest(2, {shard(0): ("a", "b"), shard(1): ("d", "d")})
    views = [
        NodeView("a", UP, (holding("a", torn, shard(0)),)),
        NodeView("b", UP, (holding("b", PAIR, shard(0)),)),
        NodeView("c", ASSUMED, (holding("c", PAIR, shard(1)),)),
        NodeView("d", GONE, None),
        NodeView("e", UP, ()),
    ]
    plan = plan_repair({of.save_id: of for of in (PAIR, torn)}, views)
    assert [(action.node_id, action.save_id) for action in plan.restore] == [("e", PAIR.save_id)]


def test_a_damaged_copy_on_a_silent_node_is_not_combined() -> None:
    """A damaged copy on a silent node is not combined with another damaged one: the shard is lost."""
    bad = {node: replace(holding(node, PAIR, *BOTH), damaged=(shard(1),)) for node in "ab"}
    plan = plan_repair({PAIR.save_id: PAIR}, [NodeView("a", UP, (bad["a"],)), NodeView("b", ASSUMED, (bad["b"],))])
    assert plan.actions == ()
    assert [(lost.shard, lost.waits_for) for lost in plan.lost] == [(shard(1), ("b (host-b)",))]


def test_a_blank_node_gets_no_save_without_metadata() -> None:
    """A blank node gets the older save if no node has the newer one's metadata."""
    newer = manifest(2, {shard(0): ("a", "b"), shard(1): ("b", "a")})
    views = [
        NodeView("a", UP, (holding("a", newer, *BOTH, has_metadata=False),)),
        NodeView("b", UP, (holding("b", PAIR, shard(0)),)),
        NodeView("c", ASSUMED, (holding("c", PAIR, shard(1)),)),
        NodeView("e", UP, ()),
    ]
    plan = plan_repair({of.save_id: of for of in (PAIR, newer)}, views)
    assert [(action.node_id, action.save_id) for action in plan.restore] == [("e", PAIR.save_id)]


def test_an_older_save_gets_no_copies_beside_a_complete_newer_one() -> None:
    """An older save beside a complete newer one gets no copies, and is not reported as short."""
    newer = manifest(2, {shard(0): ("a", "b"), shard(1): ("b", "a")})
    views = [NodeView("a", UP, (holding("a", newer, *BOTH),)), NodeView("b", UP, (holding("b", PAIR, shard(0)),))]
    plan = plan_repair({of.save_id: of for of in (PAIR, newer)}, views)
    assert {action.save_id for action in plan.actions} == {newer.save_id}
    assert plan.short == ()


def test_a_third_copy_goes_to_a_domain_that_has_none() -> None:
    """A third copy goes to a domain without any copy."""
    domains = {"a": "r1", "b": "r2", "c": "r1", "d": "r3"}
    three = manifest(1, {shard(0): ("a", "b", "x")}, copies=3, domains=domains)
    views = [NodeView(node, UP, (holding(node, three, shard(0)),)) for node in "ab"]
    views += [NodeView(node, UP, (holding(node, three),)) for node in "cd"]
    plan = plan_repair({three.save_id: three}, [*views, NodeView("x", GONE, None)])
    assert copies(plan) == [(shard(0), "d", ("a", "b"))]


def test_a_copy_goes_where_there_is_room_for_it() -> None:
    """Planned copies count against a node's free space. If no node has space, the intended holder is chosen."""
    wide = manifest(1, dict.fromkeys(map(shard, range(4)), ("a", "b")))
    there = NodeView("a", UP, (holding("a", wide, *wide.shards),))

    def taken(**writable: int | None) -> list[str]:
        views = [NodeView(node, UP, (holding(node, wide),), writable_bytes=room) for node, room in writable.items()]
        return [node for _, node, _ in copies(plan_repair({wide.save_id: wide}, [there, *views]))]

    assert taken(b=None, c=0) == ["b"] * 4
    assert taken(b=250, c=150) == ["b", "b", "c", "b"]
    assert taken(b=0, c=1000, d=None) == ["c", "d", "c", "d"]
    assert taken(b=0, c=0) == ["b"] * 4
