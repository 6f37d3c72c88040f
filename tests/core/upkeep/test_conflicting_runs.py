"""Saves of two runs under one name: neither replaces the other, except on the node where it was overwritten."""

from dataclasses import replace

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.protocol.settlement import may_be_dropped, may_publish
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles

RUN, OTHER = "a" * 16, "b" * 16
SHARD = "__0_0.distcp"


def manifest(number: int, lineage: str, holders: tuple[str, ...], copies: int = 2) -> Manifest:
    nodes = tuple(NodeEntry(node, f"host-{node}", None, (0,)) for node in holders)
    entry = ShardEntry(100, 7, 0, holders[0], holders)
    return Manifest(
        f"{number:032x}", "step-2", number, float(number), 1, copies, 8, 9, nodes, {SHARD: entry}, lineage=lineage
    )


def held(node: str, of: Manifest, *shards: str, is_replaced: bool = False) -> Holding:
    sizes = dict.fromkeys(shards, 100)
    return replace(Holding.of_save(of, node, of.checkpoint_id, True, sizes), is_replaced=is_replaced)


def view(node: str, *holdings: Holding) -> NodeView:
    return NodeView(node, Presence.UP, holdings)


OURS, FOREIGN = manifest(8, RUN, ("b", "c")), manifest(7, OTHER, ("a", "b"))
BOTH = {found.save_id: found for found in (FOREIGN, OURS)}


def test_a_node_that_was_away_keeps_the_overwritten_save() -> None:
    """A node that was away keeps the old run's save, and gets no copy of the new one. The report has the next steps."""
    views = [view("a", held("a", FOREIGN)), view("b", held("b", OURS, SHARD)), view("c", held("c", OURS, SHARD))]
    plan = plan_repair(BOTH, views)
    assert plan.actions == ()
    assert plan.lost == (), "its user has overwritten that save on node b"
    (short,) = plan.short
    assert (short.save_id, short.taken_on, short.lies_on) == (FOREIGN.save_id, ("b", "c"), ("a",))
    assert "another run's save has its name on node b and node c" in str(short)
    assert "rename its directory on node a" in str(short)
    assert f"`replicated-ckpt rm step-2 --save {FOREIGN.save_id} --root ROOT`" in str(short)
    removed = plan_repair(BOTH, [view("a"), *views[1:]])
    assert [(action.node_id, action.save_id) for action in removed.restore] == [("a", OURS.save_id)]


def test_a_missing_shard_that_no_other_run_replaced_is_lost() -> None:
    """A missing shard whose holder has no other run's save of that name is lost."""
    gone = manifest(7, OTHER, ("a",))
    views = [view("a", held("a", gone)), view("b", held("b", OURS, SHARD)), view("c", held("c", OURS, SHARD))]
    (short,) = plan_repair({one.save_id: one for one in (gone, OURS)}, views).lost
    assert (short.save_id, short.shard) == (gone.save_id, SHARD)


def test_a_version_that_a_complete_save_replaced_is_not_repaired() -> None:
    """A version replaced by a complete save gets no copies on that node. While the new save is incomplete, the replaced
    one is repaired.
    """
    a, b = view("a", held("a", FOREIGN, SHARD, is_replaced=True), held("a", OURS, SHARD)), view("b")
    assert [action.save_id for action in plan_repair(BOTH, [a, b]).actions] == [OURS.save_id] * 2
    part = view("a", held("a", FOREIGN, SHARD, is_replaced=True), held("a", OURS))
    silent = NodeView("c", Presence.ASSUMED, None)
    assert FOREIGN.save_id in {short.save_id for short in plan_repair(BOTH, [part, b, silent]).short}
    still_named = view("b", held("b", FOREIGN))
    assert [(one.node_id, one.save_id) for one in plan_repair(BOTH, [a, still_named]).copy] == [("b", FOREIGN.save_id)]


def test_two_runs_on_different_nodes_keep_one_name_and_the_report_has_the_next_step() -> None:
    """Two runs have one name on different nodes: neither replaces the other, and the report has the nodes and the next
    step.
    """
    plan = plan_repair(BOTH, [view("a", held("a", FOREIGN, SHARD)), view("b", held("b", OURS, SHARD))])
    assert plan.actions == ()
    by_save = {short.save_id: short for short in plan.short}
    assert by_save[FOREIGN.save_id].taken_on == ("b",)
    assert by_save[OURS.save_id].taken_on == ("a",)
    words = str(by_save[FOREIGN.save_id])
    assert "another run's save has its name on node b" in words
    assert "rename its directory on node a" in words


def test_files_of_an_unknown_save_are_replaced_only_if_one_run_is_known() -> None:
    """Files of an unknown save are replaced only if one run has the name. With two runs, they may belong to the other."""
    unknown = NodeView("a", Presence.UP, (), (UnclaimedFiles("a", "step-2", True, {SHARD: 100}, {SHARD: 8}),))
    views = [unknown, view("b", held("b", OURS, SHARD)), view("c", held("c", OURS, SHARD))]
    assert [action.node_id for action in plan_repair(BOTH, views, "a").restore] == ["a"]
    met = [*views, view("d", held("d", FOREIGN, SHARD))]
    assert [action for action in plan_repair(BOTH, met, "a").restore if action.node_id == "a"] == []


def test_a_save_replaces_only_the_version_that_it_was_opened_over() -> None:
    """A save replaces only the version that it was opened over, and that version is dropped only once the save is
    complete and published.
    """
    ours, theirs = OURS.version, FOREIGN.version
    assert may_publish(ours, theirs, theirs.save_id)
    assert not may_publish(ours, theirs, "")
    assert not may_publish(ours, manifest(6, OTHER, ("a",)).version, theirs.save_id)
    assert may_be_dropped(theirs, whole=[ours], published=ours)
    assert not may_be_dropped(theirs, whole=[], published=ours)
    assert not may_be_dropped(theirs, whole=[ours], published=None)
    assert not may_be_dropped(theirs, whole=[ours], published=theirs)
