"""A save over another run's checkpoint: where it takes that one's place, and when two runs' saves of one name both stay."""

from dataclasses import replace

import pytest

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.lineage import REPLACES_MAX, Named, Version, check_replaces, join_replaced
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, decode_manifest
from replicated_ckpt.core.protocol.settlement import may_be_dropped, may_publish
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair

RUN, OTHER = "a" * 16, "b" * 16
SHARD = "__0_0.distcp"


def manifest(number: int, lineage: str, holders: tuple[str, ...], copies: int = 2) -> Manifest:
    nodes = tuple(NodeEntry(node, f"host-{node}", None, (0,)) for node in holders)
    entry = ShardEntry(100, 7, 0, holders[0], holders)
    return Manifest(
        f"{number:032x}", "step-2", number, float(number), 1, copies, 8, 9, nodes, {SHARD: entry}, lineage=lineage
    )


def view(node: str, of: Manifest, *shards: str, is_replaced: bool = False) -> NodeView:
    holding = Holding(
        node,
        of.checkpoint_id,
        of.save_id,
        of.sequence,
        True,
        dict.fromkeys(shards, 100),
        created_unix_s=of.created_unix_s,
        lineage=of.lineage,
        is_replaced=is_replaced,
    )
    return NodeView(node, Presence.UP, (holding,))


FOREIGN = manifest(7, OTHER, ("b", "c"))
OURS = replace(manifest(1, RUN, ("b", "c")), replaces=(FOREIGN.save_id,))
BOTH = {found.save_id: found for found in (FOREIGN, OURS)}


def test_a_whole_save_takes_the_place_of_what_it_replaces_on_every_node() -> None:
    """A node that was away keeps a manifest of the other run's save for ever else, whose shards are gone everywhere."""
    views = [view("a", FOREIGN), view("b", OURS, SHARD), view("c", OURS, SHARD)]
    plan = plan_repair(BOTH, views)
    assert [(action.node_id, action.save_id) for action in plan.restore] == [("a", OURS.save_id)]
    assert plan.short == ()
    assert plan_repair(BOTH, [view("a", OURS), *views[1:]]).is_complete


def test_nothing_gives_way_before_the_new_save_is_whole() -> None:
    """While a shard of it was not seen, the other run's save is mended where it is, and is not said to be lost."""
    views = [view("a", FOREIGN, SHARD), view("b", OURS), NodeView("c", Presence.ASSUMED, None)]
    plan = plan_repair(BOTH, views)
    assert all(action.save_id == FOREIGN.save_id or action.node_id == "b" for action in plan.restore)
    assert not may_be_dropped(FOREIGN.version, whole=[], published=OURS.version)
    gone = plan_repair(BOTH, [view("a", FOREIGN), *views[1:]])
    assert [(short.save_id, short.is_lost) for short in gone.short if short.save_id == FOREIGN.save_id] == [
        (FOREIGN.save_id, False)
    ]


def test_two_runs_that_never_met_keep_one_name_and_the_words_say_what_to_do() -> None:
    """Neither gives way; the one that can have no more copies says on which node its name is taken, and the next step."""
    ours = replace(OURS, replaces=())
    plan = plan_repair({m.save_id: m for m in (FOREIGN, ours)}, [view("a", FOREIGN, SHARD), view("b", ours, SHARD)])
    assert plan.actions == ()
    by_save = {short.save_id: short for short in plan.short}
    assert by_save[FOREIGN.save_id].taken_on == ("b",)
    assert by_save[ours.save_id].taken_on == ("a",)
    words = str(by_save[FOREIGN.save_id])
    assert "another run has its name on node b" in words
    assert "rename its directory on each node" in words


def test_the_name_is_taken_only_from_what_was_there() -> None:
    """A save of the other run that came later, or that no node of the save had, is not replaced by it."""
    later = manifest(8, OTHER, ("a",)).version
    assert may_publish(OURS.version, FOREIGN.version, "")
    assert not may_publish(OURS.version, later, "")
    assert not may_publish(FOREIGN.version, OURS.version, "")
    assert may_be_dropped(FOREIGN.version, whole=[OURS.version], published=None)
    assert not may_be_dropped(later, whole=[OURS.version], published=None)


def test_what_was_replaced_before_is_inherited() -> None:
    """A node that comes back after two overwrites learns of the first one, too; the run's own saves have their order."""
    before = Named("2" * 32, RUN, ("1" * 32,))
    assert join_replaced(RUN, [before, Named("3" * 32, OTHER)]) == ("1" * 32, "3" * 32)
    many = Named("f" * 32, OTHER, tuple(f"{n:032x}" for n in range(REPLACES_MAX)))
    assert join_replaced(RUN, [many])[-1] == "f" * 32
    assert len(join_replaced(RUN, [many])) == REPLACES_MAX


@pytest.mark.parametrize("value", [["x"], [1], 5, [f"{n:032x}" for n in range(REPLACES_MAX + 1)]])
def test_a_list_of_another_shape_is_not_believed(value: object) -> None:
    """Names of saves, and no more of them than are kept."""
    with pytest.raises((ValueError, TypeError)):
        check_replaces(value)
    with pytest.raises((ValueError, TypeError, KeyError)):
        Named.from_json({"save_id": "1" * 32, "lineage": RUN, "replaces": value})


def test_it_comes_back_as_it_was_written() -> None:
    """The manifest keeps it, and versions that differ in it alone are one version."""
    read = decode_manifest(OURS.encode(), "here")
    assert read == OURS
    assert read.version.replaces == (FOREIGN.save_id,)
    assert Version(RUN, 1, 1.0, OURS.save_id) == read.version


def test_what_was_saved_over_another_goes_before_their_order() -> None:
    """A run that goes on where its newest save was not known, and over that of the run which had replaced it.

    It numbers from what it knows. Were the other one still the newer, each of the two would be to give way to the other.
    """
    newer = manifest(5, RUN, ("a",)).version
    ours = replace(manifest(3, RUN, ("b", "c")), replaces=(newer.save_id, FOREIGN.save_id)).version
    assert may_publish(ours, newer, "")
    assert not may_publish(newer, ours, "")
    assert may_be_dropped(newer, whole=[ours], published=None)
    assert not may_be_dropped(ours, whole=[newer], published=None)
    assert may_publish(newer, replace(ours, replaces=()), "")
    assert not may_publish(replace(ours, replaces=()), newer, "")
