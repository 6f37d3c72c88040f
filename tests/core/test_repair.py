"""The repair plan: what it makes up for, where, and that it asks for nothing when nothing is missing."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.repair import NodeView, Presence, RepairPlan, planned

UP, ASSUMED, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE


def manifest(
    number: int, holders_by_shard: Mapping[str, tuple[str, ...]], copies: int = 2, domains: Mapping[str, str] = {}
) -> Manifest:
    nodes = sorted({node for holders in holders_by_shard.values() for node in holders})
    shards = {name: ShardEntry(100, 7, 0, holders[0], holders) for name, holders in holders_by_shard.items()}
    entries = tuple(NodeEntry(node, f"host-{node}", domains.get(node), (0,)) for node in nodes)
    return Manifest(f"{number:032x}", "step-1", number, 0.0, 1, copies, 8, 9, entries, shards)


def holding(node: str, of: Manifest, *shards: str, has_metadata: bool = True, size: int = 100) -> Holding:
    return Holding(node, of.checkpoint_id, of.save_id, of.sequence, has_metadata, dict.fromkeys(shards, size))


def shard(rank: int) -> str:
    return f"__{rank}_0.distcp"


def copies(plan: RepairPlan) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(action.shard, action.node_id, action.sources) for action in plan.copy]


PAIR = manifest(1, {shard(0): ("a", "b"), shard(1): ("b", "a")})
BOTH = (shard(0), shard(1))


def test_nothing_missing_means_nothing_to_do() -> None:
    """Every shard with its copies and every node with the metadata: an empty plan."""
    views = [NodeView(node, UP, (holding(node, PAIR, *BOTH),)) for node in "ab"]
    assert planned({PAIR.save_id: PAIR}, views) == RepairPlan()


def test_a_blank_node_takes_the_place_of_a_lost_one() -> None:
    """It gets manifest, metadata and a copy of every shard that has one copy left."""
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", GONE, None), NodeView("new", UP, ())]
    plan = planned({PAIR.save_id: PAIR}, views)
    assert [(action.node_id, action.sources) for action in plan.adopt] == [("new", ("a",))]
    assert copies(plan) == [(shard(0), "new", ("a",)), (shard(1), "new", ("a",))]
    assert plan.short == ()


def test_a_silent_node_is_not_taken_for_lost() -> None:
    """Until it is given up it counts as holding what it held, or, if nobody knows, what it was meant to hold."""
    for held in (None, (holding("b", PAIR, *BOTH),)):
        views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", ASSUMED, held), NodeView("new", UP, ())]
        assert planned({PAIR.save_id: PAIR}, views).copy == ()


@pytest.mark.parametrize("size", [0, 99, 101])
def test_a_copy_of_another_size_is_none(size: int) -> None:
    """The node that holds it gets a new one: it was meant to hold it."""
    views = [
        NodeView("a", UP, (holding("a", PAIR, *BOTH),)),
        NodeView("b", UP, (holding("b", PAIR, *BOTH, size=size),)),
        NodeView("c", UP, (holding("c", PAIR),)),
    ]
    assert copies(planned({PAIR.save_id: PAIR}, views)) == [(shard(0), "b", ("a",)), (shard(1), "b", ("a",))]


def test_a_damaged_copy_is_replaced_where_it_lies() -> None:
    """It counts for nothing; its place is the first to get a good copy, and intact sources come before damaged ones."""
    bad = replace(holding("b", PAIR, *BOTH), damaged=(shard(1),))
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", UP, (bad,)), NodeView("c", UP, ())]
    (action,) = planned({PAIR.save_id: PAIR}, views).copy
    assert (action.node_id, action.shard, action.sources) == ("b", shard(1), ("a", "b"))
    assert action.replaces_damaged


def test_damaged_copies_are_all_that_is_left() -> None:
    """Two of them may be whole together, so it is tried; one alone is lost."""
    bad = {node: replace(holding(node, PAIR, *BOTH), damaged=(shard(1),)) for node in "ab"}
    together = planned({PAIR.save_id: PAIR}, [NodeView(node, UP, (bad[node],)) for node in "ab"])
    assert copies(together) == [(shard(1), "a", ("a", "b")), (shard(1), "b", ("a", "b"))]
    assert together.lost == ()
    alone = planned({PAIR.save_id: PAIR}, [NodeView("a", UP, (bad["a"],))])
    assert [entry.shard for entry in alone.lost] == [shard(1)]
    assert alone.copy == ()


def test_domains_come_before_balance() -> None:
    """A new copy goes to a domain without one, if there is any."""
    three = manifest(1, {shard(0): ("a", "b")}, domains={"a": "r1", "b": "r2"})
    views = [
        NodeView("a", UP, (holding("a", three, shard(0)),)),
        NodeView("b", GONE, None),
        NodeView("c", UP, (holding("c", three),), "r1"),
        NodeView("d", UP, (holding("d", three),), "r2"),
    ]
    assert copies(planned({three.save_id: three}, views)) == [(shard(0), "d", ("a",))]


def test_many_copies_are_spread() -> None:
    """Nodes that were not meant to hold anything take about the same number of bytes each."""
    names = [shard(rank) for rank in range(8)]
    wide = manifest(1, dict.fromkeys(names, ("a", "b")))
    views = [NodeView("a", UP, (holding("a", wide, *names),)), NodeView("b", GONE, None)]
    views += [NodeView(node, UP, (holding(node, wide),)) for node in "cdef"]
    taken = [node for _, node, _ in copies(planned({wide.save_id: wide}, views))]
    assert sorted(taken) == sorted("cdef" * 2)


def test_what_no_node_holds_is_lost_and_what_cannot_be_copied_is_short() -> None:
    """A shard without a copy is lost; one that needs more nodes than there are is short; both are said."""
    plan = planned(
        {PAIR.save_id: PAIR}, [NodeView("a", UP, (holding("a", PAIR, shard(0)),)), NodeView("b", GONE, None)]
    )
    assert [(entry.shard, entry.have) for entry in plan.lost] == [(shard(1), 0)]
    assert plan.copy == ()


def test_an_older_save_of_the_same_checkpoint_gives_way_to_the_whole_newer_one() -> None:
    """A node that missed an overwrite takes the newer save over; a newer one that is not whole replaces nothing."""
    newer = manifest(2, {shard(0): ("a", "b"), shard(1): ("b", "a")})
    manifests = {PAIR.save_id: PAIR, newer.save_id: newer}
    behind = NodeView("b", UP, (holding("b", PAIR, *BOTH),))
    plan = planned(manifests, [NodeView("a", UP, (holding("a", newer, *BOTH),)), behind])
    assert [(action.node_id, action.save_id) for action in plan.adopt] == [("b", newer.save_id)]
    torn = planned(manifests, [NodeView("a", UP, (holding("a", newer, shard(0)),)), behind])
    assert {action.save_id for action in torn.adopt} <= {PAIR.save_id}
    assert all(action.node_id != "b" for action in torn.adopt)
    assert all(action.node_id != "a" for action in torn.adopt), "the newer one stays where it is"


def test_a_plan_travels_as_json() -> None:
    """What the command line plans is what the agents read."""
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", GONE, None), NodeView("new", UP, ())]
    plan = planned({PAIR.save_id: PAIR}, views)
    assert RepairPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.of_node("a").actions == ()
    assert plan.of_node("new").actions == plan.actions


NODES = "abcde"


@given(
    st.integers(1, 4),
    st.lists(st.lists(st.sampled_from(NODES), min_size=1, max_size=4, unique=True), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(NODES), st.sampled_from([UP, GONE]), min_size=1),
)
def test_carrying_the_plan_out_leaves_nothing_to_do(
    wanted: int, placed: list[list[str]], presence: Mapping[str, Presence]
) -> None:
    """Once the plan is done every shard that had a copy has as many as there are nodes for; none is made twice."""
    saved = manifest(1, {shard(rank): tuple(nodes) for rank, nodes in enumerate(placed)}, copies=wanted)
    held: dict[str, set[str]] = {
        node: {name for name, entry in saved.shards.items() if node in entry.holders}
        for node, state in presence.items()
        if state is UP
    }
    if not held:
        return

    def views() -> list[NodeView]:
        return [NodeView(node, UP, (holding(node, saved, *names),)) for node, names in held.items()]

    plan = planned({saved.save_id: saved}, views())
    assert len({(action.node_id, action.shard) for action in plan.copy}) == len(plan.copy)
    for action in plan.copy:
        assert all(action.shard in held[source] for source in action.sources)
        assert action.shard not in held[action.node_id]
    for action in plan.copy:
        held[action.node_id].add(action.shard)
    again = planned({saved.save_id: saved}, views())
    assert again.actions == ()
    for name in saved.shards:
        have = sum(name in names for names in held.values())
        assert have == 0 or have >= min(wanted, len(held))
        assert (have == 0) == (name in {entry.shard for entry in again.lost})
