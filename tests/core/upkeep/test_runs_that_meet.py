"""Saves of two runs under one name: neither takes the other's place, but on the node where it was overwritten."""

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


def test_a_node_that_was_away_keeps_what_was_saved_over_elsewhere() -> None:
    """The new save is whole on the others: that node gets no copy of it, and the words say how to end it."""
    views = [view("a", held("a", FOREIGN)), view("b", held("b", OURS, SHARD)), view("c", held("c", OURS, SHARD))]
    plan = plan_repair(BOTH, views)
    assert plan.actions == ()
    assert plan.lost == (), "its user has overwritten it on node b"
    (short,) = plan.short
    assert (short.save_id, short.taken_on, short.lies_on) == (FOREIGN.save_id, ("b", "c"), ("a",))
    assert "another run's save has its name on node b and node c" in str(short)
    assert "rename its directory on node a" in str(short)
    assert f"`replicated-ckpt rm step-2 --save {FOREIGN.save_id} --root ROOT`" in str(short)
    removed = plan_repair(BOTH, [view("a"), *views[1:]])
    assert [(action.node_id, action.save_id) for action in removed.restore] == [("a", OURS.save_id)]


def test_what_no_node_was_asked_to_give_up_is_lost() -> None:
    """The shard that is missing was to lie on a node where no other run's save has the name."""
    gone = manifest(7, OTHER, ("a",))
    views = [view("a", held("a", gone)), view("b", held("b", OURS, SHARD)), view("c", held("c", OURS, SHARD))]
    (short,) = plan_repair({one.save_id: one for one in (gone, OURS)}, views).lost
    assert (short.save_id, short.shard) == (gone.save_id, SHARD)


def test_what_a_whole_save_has_replaced_is_not_mended_where_it_goes() -> None:
    """A load may read it there still. Until the new one is whole it is a version like any other."""
    a, b = view("a", held("a", FOREIGN, SHARD, is_replaced=True), held("a", OURS, SHARD)), view("b")
    assert [action.save_id for action in plan_repair(BOTH, [a, b]).actions] == [OURS.save_id] * 2
    part = view("a", held("a", FOREIGN, SHARD, is_replaced=True), held("a", OURS))
    silent = NodeView("c", Presence.ASSUMED, None)
    assert FOREIGN.save_id in {short.save_id for short in plan_repair(BOTH, [part, b, silent]).short}
    still_named = view("b", held("b", FOREIGN))
    assert [(one.node_id, one.save_id) for one in plan_repair(BOTH, [a, still_named]).copy] == [("b", FOREIGN.save_id)]


def test_two_runs_that_never_met_keep_one_name_and_the_words_say_what_to_do() -> None:
    """Neither gives way; the one that can have no more copies says on which node its name is taken, and the next step."""
    plan = plan_repair(BOTH, [view("a", held("a", FOREIGN, SHARD)), view("b", held("b", OURS, SHARD))])
    assert plan.actions == ()
    by_save = {short.save_id: short for short in plan.short}
    assert by_save[FOREIGN.save_id].taken_on == ("b",)
    assert by_save[OURS.save_id].taken_on == ("a",)
    words = str(by_save[FOREIGN.save_id])
    assert "another run's save has its name on node b" in words
    assert "rename its directory on node a" in words


def test_files_of_an_unknown_save_give_way_only_where_one_run_is_known() -> None:
    """They may be of the run that has the name elsewhere."""
    unknown = NodeView("a", Presence.UP, (), (UnclaimedFiles("a", "step-2", True, {SHARD: 100}, {SHARD: 8}),))
    views = [unknown, view("b", held("b", OURS, SHARD)), view("c", held("c", OURS, SHARD))]
    assert [action.node_id for action in plan_repair(BOTH, views, "a").restore] == ["a"]
    met = [*views, view("d", held("d", FOREIGN, SHARD))]
    assert [action for action in plan_repair(BOTH, met, "a").restore if action.node_id == "a"] == []


def test_the_name_is_taken_only_from_what_the_node_was_opened_over() -> None:
    """Whatever is newer by number or clock; and it goes only where the whole save has its name."""
    ours, theirs = OURS.version, FOREIGN.version
    assert may_publish(ours, theirs, theirs.save_id)
    assert not may_publish(ours, theirs, "")
    assert not may_publish(ours, manifest(6, OTHER, ("a",)).version, theirs.save_id)
    assert may_be_dropped(theirs, whole=[ours], published=ours)
    assert not may_be_dropped(theirs, whole=[], published=ours)
    assert not may_be_dropped(theirs, whole=[ours], published=None)
    assert not may_be_dropped(theirs, whole=[ours], published=theirs)
