"""The repair plan: which copies it makes and where. It is empty if nothing is missing."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles

UP, ASSUMED, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE


def manifest(
    number: int, holders_by_shard: Mapping[str, tuple[str, ...]], copies: int = 2, domains: Mapping[str, str] = {}
) -> Manifest:
    nodes = sorted({node for holders in holders_by_shard.values() for node in holders}.union(domains))
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
    """With all copies and metadata the plan is empty."""
    views = [NodeView(node, UP, (holding(node, PAIR, *BOTH),)) for node in "ab"]
    assert plan_repair({PAIR.save_id: PAIR}, views) == RepairPlan()


def test_a_copy_goes_first_where_no_older_version_is_in_its_way() -> None:
    """A copy of the newer version goes to a node without the older one. That node drops the older one only once the
    newer has its copies.

    Source: torture, seed 924637.
    """
    old, new = manifest(1, {shard(0): ("b", "a")}), manifest(2, {shard(0): ("a", "b")})
    views = [
        NodeView("a", UP, (holding("a", new, shard(0)),)),
        NodeView("b", UP, (holding("b", old, shard(0)),)),
        NodeView("c", UP, (holding("c", new),)),
    ]
    plan = plan_repair({old.save_id: old, new.save_id: new}, views)
    assert copies(plan) == [(shard(0), "c", ("a",))]


def test_a_blank_node_takes_the_place_of_a_lost_one() -> None:
    """A blank node gets manifest, metadata and a copy of every shard with one copy left."""
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", GONE, None), NodeView("new", UP, ())]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
    assert [(action.node_id, action.sources) for action in plan.restore] == [("new", ("a",))]
    assert copies(plan) == [(shard(0), "new", ("a",)), (shard(1), "new", ("a",))]
    assert plan.short == ()


def test_a_silent_node_is_not_taken_for_lost() -> None:
    """Until a silent node counts as lost, its last known holdings count, or else its intended ones."""
    for held in (None, (holding("b", PAIR, *BOTH),)):
        views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", ASSUMED, held), NodeView("new", UP, ())]
        assert plan_repair({PAIR.save_id: PAIR}, views).copy == ()


@pytest.mark.parametrize("size", [0, 99, 101])
def test_a_copy_of_another_size_does_not_count(size: int) -> None:
    """A node whose copy has a wrong size gets a good one in its place."""
    views = [
        NodeView("a", UP, (holding("a", PAIR, *BOTH),)),
        NodeView("b", UP, (holding("b", PAIR, *BOTH, size=size),)),
        NodeView("c", UP, (holding("c", PAIR),)),
    ]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
    assert copies(plan) == [(shard(0), "b", ("a", "b")), (shard(1), "b", ("a", "b"))]
    assert all(action.replaces_damaged for action in plan.copy)


def test_a_damaged_copy_is_replaced_where_it_lies() -> None:
    """A damaged copy does not count, and its node is the first to get a good one. Intact sources come before damaged
    ones.
    """
    bad = replace(holding("b", PAIR, *BOTH), damaged=(shard(1),))
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", UP, (bad,)), NodeView("c", UP, ())]
    (action,) = plan_repair({PAIR.save_id: PAIR}, views).copy
    assert (action.node_id, action.shard, action.sources) == ("b", shard(1), ("a", "b"))
    assert action.replaces_damaged
    assert str(action).endswith(" from a"), "the text names intact sources only"
    assert str(replace(action, sources=("b",))).endswith(" from its own data")


def test_damaged_copies_are_all_that_is_left() -> None:
    """Two damaged copies may be complete together, so a repair is planned. A single one is lost."""
    bad = {node: replace(holding(node, PAIR, *BOTH), damaged=(shard(1),)) for node in "ab"}
    together = plan_repair({PAIR.save_id: PAIR}, [NodeView(node, UP, (bad[node],)) for node in "ab"])
    assert copies(together) == [(shard(1), "a", ("a", "b")), (shard(1), "b", ("a", "b"))]
    assert together.lost == ()
    alone = plan_repair({PAIR.save_id: PAIR}, [NodeView("a", UP, (bad["a"],))])
    assert [entry.shard for entry in alone.lost] == [shard(1)]
    assert alone.copy == ()


def test_domains_come_before_balance() -> None:
    """A new copy goes to a domain without one, if there is any."""
    three = manifest(1, {shard(0): ("a", "b")}, domains={"a": "r1", "b": "r2", "c": "r1", "d": "r2"})
    views = [
        NodeView("a", UP, (holding("a", three, shard(0)),)),
        NodeView("b", GONE, None),
        NodeView("c", UP, (holding("c", three),)),
        NodeView("d", UP, (holding("d", three),)),
    ]
    assert copies(plan_repair({three.save_id: three}, views)) == [(shard(0), "d", ("a",))]


def test_without_domains_a_new_copy_goes_to_another_host() -> None:
    """Without domains, a new copy goes to a node with another boot id, not to another container of the same host."""
    plain = manifest(1, {shard(0): ("a", "b")}, domains=dict.fromkeys("abcd", ""))
    boots = {"a": "boot-1", "b": "boot-2", "c": "boot-1", "d": "boot-2"}
    hosts = replace(plain, nodes=tuple(replace(node, boot_id=boots[node.node_id]) for node in plain.nodes))
    views = [
        NodeView("a", UP, (holding("a", hosts, shard(0)),)),
        NodeView("b", GONE, None),
        NodeView("c", UP, (holding("c", hosts),)),
        NodeView("d", UP, (holding("d", hosts),)),
    ]
    assert copies(plan_repair({hosts.save_id: hosts}, views)) == [(shard(0), "d", ("a",))]


def test_a_node_is_in_the_domain_that_its_newest_save_names() -> None:
    """A node that moved counts in the domain of the newest save, also for copies of older saves.

    A newer checkpoint of stock torch, which has no domains, is ignored.
    """
    run: dict[str, Any] = {"lineage": "1" * 16}
    before = replace(manifest(1, {shard(0): ("a", "b")}, domains={"a": "r1", "b": "r2", "c": "r1", "d": "r1"}), **run)
    moved = {"a": "r1", "c": "r1", "d": "r2"}
    after = replace(manifest(2, {shard(0): ("a", "d")}, domains=moved), checkpoint_id="step-2", **run)
    adopted = replace(manifest(0, {shard(0): ("a", "d")}), checkpoint_id="of stock torch", created_unix_s=1e9)
    saves = {each.save_id: each for each in (after, before, adopted)}
    views = [NodeView("a", UP, (holding("a", before, shard(0)),)), NodeView("b", GONE, None)]
    views += [NodeView(node, UP, (holding(node, before),)) for node in "cd"]
    assert copies(plan_repair(saves, views)) == [(shard(0), "d", ("a",))]


def test_many_copies_are_spread() -> None:
    """Nodes that are no intended holders get about the same number of bytes each."""
    names = [shard(rank) for rank in range(8)]
    wide = manifest(1, dict.fromkeys(names, ("a", "b")))
    views = [NodeView("a", UP, (holding("a", wide, *names),)), NodeView("b", GONE, None)]
    views += [NodeView(node, UP, (holding(node, wide),)) for node in "cdef"]
    taken = [node for _, node, _ in copies(plan_repair({wide.save_id: wide}, views))]
    assert sorted(taken) == sorted("cdef" * 2)


def test_a_shard_without_a_copy_is_lost() -> None:
    """A shard without a copy is lost, and without a blank node no copy is planned."""
    plan = plan_repair(
        {PAIR.save_id: PAIR}, [NodeView("a", UP, (holding("a", PAIR, shard(0)),)), NodeView("b", GONE, None)]
    )
    assert [(entry.shard, entry.have) for entry in plan.lost] == [(shard(1), 0)]
    assert plan.copy == ()


NEWER = manifest(2, {shard(0): ("a", "b"), shard(1): ("b", "a")})
VERSIONS = {PAIR.save_id: PAIR, NEWER.save_id: NEWER}


def restored(plan: RepairPlan) -> list[tuple[str, str]]:
    return [(action.node_id, action.save_id) for action in plan.restore]


def test_a_complete_newer_save_replaces_an_older_one() -> None:
    """A node that missed an overwrite gets the newer save once that is complete. An incomplete newer save replaces
    nothing.
    """
    behind = NodeView("b", UP, (holding("b", PAIR, *BOTH),))
    plan = plan_repair(VERSIONS, [NodeView("a", UP, (holding("a", NEWER, *BOTH),)), behind])
    assert restored(plan) == [("b", NEWER.save_id)]
    torn = plan_repair(VERSIONS, [NodeView("a", UP, (holding("a", NEWER, shard(0)),)), behind])
    assert torn.actions == ()
    assert {(entry.save_id, entry.shard) for entry in torn.short if entry.is_in_doubt} == {
        (NEWER.save_id, shard(0)),
        (NEWER.save_id, shard(1)),
    }
    assert torn.lost == (), "the older save is complete"


@pytest.mark.parametrize("last_seen", [None, (holding("c", NEWER, shard(1)),)])
def test_assumed_holdings_replace_no_older_save(last_seen: tuple[Holding, ...] | None) -> None:
    """A newer save that is complete only with a silent node's assumed holdings does not replace an older one."""
    newer = manifest(2, {shard(0): ("a", "b"), shard(1): ("c", "b")})
    views = [
        NodeView("a", UP, (holding("a", newer, shard(0)),)),
        NodeView("b", UP, (holding("b", PAIR, *BOTH),)),
        NodeView("c", ASSUMED, last_seen),
    ]
    plan = plan_repair({PAIR.save_id: PAIR, newer.save_id: newer}, views)
    assert plan.actions == ()
    assert any(entry.is_in_doubt and entry.waits_for == ("c (host-c)",) for entry in plan.short)
    seen = NodeView("c", UP, (holding("c", newer, shard(1)),))
    back = plan_repair({PAIR.save_id: PAIR, newer.save_id: newer}, [*views[:2], seen])
    assert ("b", newer.save_id) in restored(back)


@pytest.mark.parametrize("defect", ["damaged", "size", "metadata"])
def test_only_a_save_seen_intact_replaces_an_older_one(defect: str) -> None:
    """A newer save with a damaged file, a wrong size or missing metadata does not replace an older one."""
    good = holding("a", NEWER, *BOTH)
    seen = {
        "damaged": replace(good, damaged=(shard(1),)),
        "size": replace(good, sizes={shard(0): 100, shard(1): 99}),
        "metadata": replace(good, has_metadata=False),
    }[defect]
    plan = plan_repair(VERSIONS, [NodeView("a", UP, (seen,)), NodeView("b", UP, (holding("b", PAIR, *BOTH),))])
    assert all(save_id != NEWER.save_id for node_id, save_id in restored(plan) if node_id == "b")
    assert not plan.is_complete


def test_while_no_save_is_complete_each_is_repaired_where_it_is() -> None:
    """While neither version is complete, each is repaired on its own nodes, and neither replaces the other."""
    views = [
        NodeView("a", UP, (holding("a", NEWER, shard(0)),)),
        NodeView("b", UP, (holding("b", NEWER),)),
        NodeView("c", UP, (holding("c", PAIR, shard(0)),)),
        NodeView("d", UP, (holding("d", PAIR, has_metadata=False),)),
    ]
    plan = plan_repair(VERSIONS, views)
    assert restored(plan) == [("d", PAIR.save_id)]
    assert {(action.save_id, action.node_id) for action in plan.copy} == {(NEWER.save_id, "b"), (PAIR.save_id, "d")}


def test_a_replaced_save_is_repaired() -> None:
    """While the newer save is in doubt, the replaced one gets copies, also on blank nodes, but does not take its name
    back.
    """
    aside = replace(holding("a", PAIR, shard(0)), is_replaced=True)
    views = [
        NodeView("a", UP, (holding("a", NEWER, shard(0)), aside)),
        NodeView("b", UP, (holding("b", PAIR, shard(1)),)),
        NodeView("c", UP, ()),
    ]
    plan = plan_repair(VERSIONS, views)
    assert {(action.save_id, action.node_id, action.shard) for action in plan.copy} == {
        (PAIR.save_id, "a", shard(1)),
        (PAIR.save_id, "b", shard(0)),
    }
    assert restored(plan) == [("c", PAIR.save_id)]
    assert all(entry.is_in_doubt for entry in plan.short)


def test_a_lineage_replaces_no_other() -> None:
    """Two runs used one id: each is repaired where it is, and a blank node gets the run saved last."""
    other = replace(NEWER, lineage="a" * 16, sequence=7, created_unix_s=5.0)
    mine = replace(PAIR, lineage="b" * 16, created_unix_s=9.0)
    views = [
        NodeView("a", UP, (of_lineage(holding("a", other, *BOTH), other),)),
        NodeView("b", UP, (of_lineage(holding("b", other, shard(0), has_metadata=False), other),)),
        NodeView("c", UP, (of_lineage(holding("c", mine, *BOTH), mine),)),
        NodeView("d", UP, ()),
    ]
    plan = plan_repair({other.save_id: other, mine.save_id: mine}, views)
    assert restored(plan) == [("d", mine.save_id), ("b", other.save_id)]
    assert {(action.save_id, action.node_id, action.shard) for action in plan.copy} == {
        (mine.save_id, "d", shard(0)),
        (mine.save_id, "d", shard(1)),
        (other.save_id, "b", shard(1)),
    }


def of_lineage(found: Holding, of: Manifest) -> Holding:
    return replace(found, lineage=of.lineage, created_unix_s=of.created_unix_s)


def test_a_damaged_extra_copy_is_repaired() -> None:
    """A damaged copy is repaired even if there are enough intact ones."""
    bad = replace(holding("c", PAIR, *BOTH), damaged=(shard(0),))
    views = [NodeView(node, UP, (holding(node, PAIR, *BOTH),)) for node in "ab"] + [NodeView("c", UP, (bad,))]
    (action,) = plan_repair({PAIR.save_id: PAIR}, views).copy
    assert (action.node_id, action.shard, action.replaces_damaged) == ("c", shard(0), True)


def test_a_damaged_copy_that_cannot_be_repaired_now_is_reported() -> None:
    """If the intact copies are on silent nodes, the damaged shard is reported as short, and not as lost."""
    bad = replace(holding("b", PAIR, *BOTH), damaged=(shard(0),))
    plan = plan_repair({PAIR.save_id: PAIR}, [NodeView("a", ASSUMED, None), NodeView("b", UP, (bad,))])
    assert plan.actions == ()
    assert [(entry.shard, entry.have, entry.waits_for) for entry in plan.short] == [(shard(0), 1, ("a (host-a)",))]
    assert plan.lost == ()


def test_a_copy_with_a_damaged_footer_is_a_source() -> None:
    """A single copy with only a damaged footer is not lost. Among damaged copies it is the first source."""
    footer_damaged = replace(holding("b", PAIR, *BOTH), damaged=(shard(1),), footer_damaged=(shard(1),))
    (action,) = plan_repair({PAIR.save_id: PAIR}, [NodeView("b", UP, (footer_damaged,))]).copy
    assert (action.node_id, action.sources) == ("b", ("b",))
    bad = replace(holding("a", PAIR, *BOTH), damaged=(shard(1),))
    plan = plan_repair({PAIR.save_id: PAIR}, [NodeView("a", UP, (bad,)), NodeView("b", UP, (footer_damaged,))])
    assert {action.sources for action in plan.copy} == {("b", "a")}


def test_a_shard_that_the_manifest_does_not_name_is_set_aside() -> None:
    """A shard that is not in the manifest is quarantined."""
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH, shard(7)),)), NodeView("b", UP, (holding("b", PAIR, *BOTH),))]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
    assert [(action.node_id, action.shard) for action in plan.set_aside] == [("a", shard(7))]
    assert not plan.is_complete


def test_metadata_is_taken_from_a_node_whose_manifest_is_damaged() -> None:
    """One node lacks metadata and another has a damaged manifest: each is the other's source."""
    left = holding("a", PAIR, *BOTH, has_metadata=False)
    right = unclaimed("b", {".metadata": (8, 9), shard(0): (100, 7), shard(1): (100, 7)})
    views = [NodeView("a", UP, (left,)), NodeView("b", UP, (), unclaimed=(right,))]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
    assert [(action.node_id, action.sources) for action in plan.restore] == [("a", ("b",)), ("b", ("a",))]
    assert plan.copy == ()
    assert plan.short == ()


def unclaimed(node: str, files: Mapping[str, tuple[int, int | None]], checkpoint_id: str = "step-1") -> UnclaimedFiles:
    sizes = {name: size for name, (size, _) in files.items()}
    return UnclaimedFiles(
        node, checkpoint_id, True, sizes, {name: crc for name, (_, crc) in files.items() if crc is not None}
    )


def test_files_without_a_manifest_are_those_of_the_save_that_they_match() -> None:
    """Files without a manifest belong to the save that they match, not to the newest, and do not make that one
    complete.
    """
    newer = replace(NEWER, shards={name: replace(entry, crc32c=8) for name, entry in NEWER.shards.items()})
    manifests = {PAIR.save_id: PAIR, newer.save_id: newer}
    views = [
        NodeView("a", UP, (holding("a", newer, shard(0)),)),
        NodeView("b", UP, (), unclaimed=(unclaimed("b", {".metadata": (8, 9), shard(1): (100, 7)}),)),
        NodeView("c", UP, (holding("c", PAIR, shard(0)),)),
    ]
    plan = plan_repair(manifests, views)
    assert restored(plan) == [("b", PAIR.save_id)]
    assert {(action.node_id, action.shard, action.save_id) for action in plan.copy} == {
        ("b", shard(0), PAIR.save_id),
        ("c", shard(1), PAIR.save_id),
    }


def test_files_of_an_unknown_save_stay() -> None:
    """Files of an unknown save stay while a node is silent, which may have their manifest. If all nodes answer, their
    node replaces them by a complete save.
    """
    foreign = NodeView("c", UP, (), unclaimed=(unclaimed("c", {shard(0): (100, 66)}),))
    there = [NodeView(node, UP, (holding(node, PAIR, *BOTH),)) for node in "ab"]
    for silent in (ASSUMED, GONE):
        plan = plan_repair({PAIR.save_id: PAIR}, [*there, foreign, NodeView("d", silent, None)], "c")
        assert plan.actions == ()
        assert [(entry.shard, entry.save_id, entry.waits_for) for entry in plan.short] == [
            (".manifest.json", "", ("d",))
        ]
        assert plan.lost == ()
        assert str(plan.short[0]) == "step-1/.manifest.json (owner node c): on no node that answers; bring back node d"
    assert plan_repair({PAIR.save_id: PAIR}, [*there, foreign], "a").actions == (), (
        "node a plans no action of c, which may know other nodes"
    )
    assert restored(plan_repair({PAIR.save_id: PAIR}, [*there, foreign], "c")) == [("c", PAIR.save_id)]
    (alone,) = plan_repair({}, [foreign]).lost
    assert (alone.shard, alone.owner) == (".manifest.json", "node c")


def test_a_lost_shard_names_the_nodes_to_bring_back() -> None:
    """A lost shard lists its silent intended holders with their hosts."""
    plan = plan_repair(
        {PAIR.save_id: PAIR}, [NodeView("a", UP, (holding("a", PAIR, shard(0)),)), NodeView("b", GONE, None)]
    )
    (lost,) = plan.lost
    assert lost.waits_for == ("b (host-b)",)
    assert "bring back node b (host-b)" in str(lost)


def test_a_plan_decodes_unchanged() -> None:
    """A plan decodes from JSON unchanged."""
    views = [NodeView("a", UP, (holding("a", PAIR, *BOTH),)), NodeView("b", GONE, None), NodeView("new", UP, ())]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
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
    """After the plan was carried out, every shard with a copy has as many as possible, and the next plan is empty."""
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

    plan = plan_repair({saved.save_id: saved}, views())
    assert len({(action.node_id, action.shard) for action in plan.copy}) == len(plan.copy)
    for action in plan.copy:
        assert all(action.shard in held[source] for source in action.sources)
        assert action.shard not in held[action.node_id]
    for action in plan.copy:
        held[action.node_id].add(action.shard)
    again = plan_repair({saved.save_id: saved}, views())
    assert again.actions == ()
    for name in saved.shards:
        have = sum(name in names for names in held.values())
        assert have == 0 or have >= min(wanted, len(held))
        assert (have == 0) == (name in {entry.shard for entry in again.lost})


def test_a_leaving_node_is_a_source_but_gets_no_copies() -> None:
    """A leaving node's copies do not count: others get copies, from the leaving node if there is no other source. It
    gets none.
    """
    views = [
        NodeView("a", UP, (holding("a", PAIR, *BOTH),), is_leaving=True),
        NodeView("b", UP, (holding("b", PAIR, shard(0)),)),
        NodeView("c", UP, ()),
    ]
    plan = plan_repair({PAIR.save_id: PAIR}, views)
    made = {(copy.node_id, copy.shard) for copy in plan.copy}
    assert "a" not in {node for node, _ in made}
    assert {shard for _, shard in made} == set(PAIR.shards)
    assert all("a" in copy.sources for copy in plan.copy)
    assert plan.short == ()
    alone = plan_repair({PAIR.save_id: PAIR}, views[:1])
    assert alone.actions == ()
    assert len(alone.short) == 2
