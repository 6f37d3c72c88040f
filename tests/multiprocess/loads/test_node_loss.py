"""Nodes are lost with their disks: which checkpoints load, which do not, and what the errors name."""

import itertools
from typing import Any

import pytest

from tests.harness.cluster import Call, call
from tests.marks import long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import loss, state

KINDS = ["plain", "meshes", "own"]
PAIRS = list(itertools.combinations(range(4), 2))
LOADED = KINDS[:2]  # `own` differs by rank and is loaded by name


def shared(digests: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in digests.items() if not name.startswith("own/")}


def own_of(ranks: int, checkpoint_id: str) -> Call[Any]:
    sizes = {f"rank{rank}": 1000 for rank in range(ranks)}
    return call(state.load_integers, sizes=sizes, checkpoint_id=checkpoint_id, kind="own")


@pytest.mark.fault
def test_the_coordinators_node_is_lost(cluster_of: ClusterOf) -> None:
    """After rank 0's node is lost, the other node loads alone, and with a blank node in either rank order."""
    cluster = cluster_of(2)
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1])
    cluster.nodes[0].lose()
    calls = [call(state.load, kinds=LOADED, checkpoint_id="step-1"), own_of(2, "step-1")]
    for nodes in ([1], [1, 0], [0, 1]):
        loaded = cluster.launch(calls, nodes=nodes)
        assert loaded.of(state.load).digests() == [shared(saved[0])] * len(nodes)
        assert loaded.of(state.load_integers).agreed() == {"rank0": 1, "rank1": 2}


@pytest.mark.fault
@pytest.mark.parametrize("lost", [[0, 3], long([0, 1, 2, 3, 4])], ids=str)
def test_any_one_of_five_nodes_is_lost(cluster_of: ClusterOf, lost: list[int]) -> None:
    """With two copies on five nodes, each node in turn is lost and returns blank: every value loads."""
    cluster = cluster_of(5)
    save = call(state.save, kinds=KINDS, checkpoint_id="step-1")
    load_by_lost = {node: call(state.load, kinds=LOADED, checkpoint_id="latest") for node in lost}
    own_by_lost = {node: own_of(5, "step-1") for node in lost}
    calls: list[Call[Any]] = [save]
    for node in lost:
        lose, bring_back = call(loss.lose, nodes=[node]), call(loss.bring_back, nodes=[node])
        calls += [lose, load_by_lost[node], own_by_lost[node], bring_back]
    results = cluster.launch(calls, nodes=range(5), timeout_s=200)
    for node in lost:
        assert results.of(load_by_lost[node]).digests() == [shared(results.of(save)[0])] * 5, f"node {node} was lost"
        assert results.of(own_by_lost[node]).agreed() == {f"rank{rank}": rank + 1 for rank in range(5)}


@pytest.mark.fault
@pytest.mark.long
@pytest.mark.parametrize("gone", [0, 4])
def test_four_survivors_of_five_go_on_without_the_fifth(cluster_of: ClusterOf, gone: int) -> None:
    """The four survivors load everything, whether the coordinator's node or the last node is lost."""
    cluster = cluster_of(5)
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=range(5))
    cluster.nodes[gone].lose()
    survivors = [node for node in range(5) if node != gone]
    loaded = cluster.launch(
        [call(state.load, kinds=LOADED, checkpoint_id="latest"), own_of(5, "step-1")], nodes=survivors
    )
    assert loaded.of(state.load).digests() == [shared(saved[0])] * 4
    assert loaded.of(state.load_integers).agreed() == {f"rank{rank}": rank + 1 for rank in range(5)}


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.parametrize("pairs", [PAIRS[1:3], long(PAIRS)], ids=str)
def test_three_copies_survive_any_two_nodes(cluster_of: ClusterOf, pairs: list[tuple[int, int]]) -> None:
    """With three copies on four nodes, each pair of nodes in turn is lost and returns blank: every value loads."""
    cluster = cluster_of(4)
    own_by_lost = {pair: own_of(4, "step-1") for pair in pairs}
    calls: list[Call[Any]] = [
        call(state.save, kinds=KINDS, checkpoint_id="step-1", copies=3),
        call(state.save_report, copies=3),
    ]
    for pair in pairs:
        calls += [call(loss.lose, nodes=pair), own_by_lost[pair], call(loss.bring_back, nodes=pair)]
    calls.append(call(state.load, kinds=LOADED, checkpoint_id="step-1"))
    results = cluster.launch(calls, nodes=range(4), timeout_s=200)
    assert [report["copies_made"] for report in results.of(state.save_report)] == [3] * 4
    for pair, own in own_by_lost.items():
        assert results.of(own).agreed() == {f"rank{rank}": rank + 1 for rank in range(4)}, f"{pair} were lost"
    assert results.of(state.load).digests() == [shared(results.of(state.save)[0])] * 4


@pytest.mark.fault
def test_losing_both_copies_raises_shard_lost_on_every_rank(cluster_of: ClusterOf) -> None:
    """The two nodes with a shard's copies are lost: every rank raises ShardLost within 20 s.

    The error has the shards, their owners and the searched nodes. "latest" loads an older checkpoint.
    """
    cluster = cluster_of(4)
    older = cluster.run(call(state.save, kinds=LOADED, checkpoint_id="step-2"), nodes=[0, 1]).agreed()
    cluster.launch([call(state.save, kinds=LOADED, checkpoint_id="step-10")], nodes=range(4))
    for buddy in cluster.nodes[2:]:
        buddy.lose()
    fails = call(state.load_fails, kinds=LOADED, checkpoint_id="step-10")
    for nodes in ([0, 1], [0, 2, 3, 1]):
        results = cluster.launch([fails, call(state.load, kinds=LOADED, checkpoint_id="latest")], nodes=nodes)
        for failure in results.of(fails):
            assert failure["types"] == ["ShardLost"]
            assert failure["seconds"] < 20
            assert failure["shards"] == ["__2_0.distcp", "__3_0.distcp"]
            assert set(failure["owner_by_shard"]) == set(failure["shards"])
            assert len(failure["searched"]) >= len(nodes)
            assert failure["hint"]
        assert results.of(state.load).digests() == [older] * len(nodes)
        assert {value["report"]["checkpoint_id"] for value in results.of(state.load)} == {"step-2"}


@pytest.mark.fault
def test_one_copy_does_not_survive(cluster_of: ClusterOf) -> None:
    """With copies=1 the checkpoint loads until a node is lost. Then every rank raises ShardLost."""
    cluster = cluster_of(2)
    save = call(state.save, kinds=["plain", "meshes"], checkpoint_id="step-1", copies=1)
    load = call(state.load, kinds=["plain", "meshes"], checkpoint_id="step-1")
    saved = cluster.launch([save, load], nodes=[0, 1])
    assert saved.of(load).digests() == saved.of(save)
    cluster.nodes[1].lose()
    failed = cluster.run(call(state.load_fails, kinds=["meshes"], checkpoint_id="step-1"), nodes=[0, 1])
    assert [failure["types"] for failure in failed] == [["ShardLost"]] * 2
    assert [failure["shards"] for failure in failed] == [["__1_0.distcp"]] * 2
