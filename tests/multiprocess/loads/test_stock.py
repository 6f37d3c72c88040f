"""Checkpoints of stock torch whose shards lie on the nodes of their ranks, with `.metadata` on one node and no
manifest.
"""

import shutil
from typing import Any

import pytest

from tests.damage import flip
from tests.harness.cluster import Call, Cluster, call
from tests.harness.launch import Digests
from tests.multiprocess.conftest import ClusterOf
from tests.steps import state, stock

SAVED = ["plain", "meshes"]


def scattered(cluster: Cluster, checkpoint_id: str, seed: int = 0) -> Digests:
    """Four ranks save into one directory. Ranks 0, 1 and 2 are then moved to one node each, rank 3 to the second node."""
    folder = cluster.base / "shared" / checkpoint_id
    steps = [call(stock.save, kinds=SAVED, folder=str(folder), seed=seed)]
    saved: Digests = cluster.launch(steps, nodes=[0], ranks=4).of(stock.save).agreed()
    for path in folder.iterdir():
        rank = 0 if path.name == ".metadata" else int(path.name.split("_")[2])
        target = cluster.nodes[rank % 3 if rank < 3 else 1].disk / checkpoint_id
        target.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target / path.name)
    shutil.rmtree(cluster.base / "shared")
    return saved


def load(checkpoint_id: str, kinds: list[str] = SAVED) -> Call[Any]:
    return call(state.load, kinds=kinds, checkpoint_id=checkpoint_id)


def test_a_scattered_stock_checkpoint_loads_in_place_and_saves_under_a_new_id(cluster_of: ClusterOf) -> None:
    """Three, four and two ranks and one process load every bit, and the files stay as they are.

    Saved under a new id, the checkpoint survives a node loss.
    """
    cluster = cluster_of(3)
    saved = scattered(cluster, "run/step-10")
    alone = {name: value for name, value in saved.items() if name.startswith("plain/")}
    before = [{path.name for path in (node.disk / "run/step-10").iterdir()} for node in cluster.nodes]
    assert [".metadata" in names for names in before] == [True, False, False]
    for nodes, ranks in (([2, 0, 1], [1, 1, 1]), ([1, 2, 0], [2, 1, 1]), ([1, 2], [1, 1])):
        by_name, latest = load("run/step-10"), load("latest")
        results = cluster.launch([by_name, latest], nodes=nodes, ranks=ranks)
        assert results.of(by_name).digests() == results.of(latest).digests() == [saved] * sum(ranks)
        warned = results.warnings_of(by_name)
        assert [len(warnings) for warnings in warned] == [1] + [0] * (sum(ranks) - 1)
        assert "stock torch wrote it" in warned[0][0]
    assert cluster.run(load("latest", ["plain"]), nodes=[2], launcher="single").digests() == [alone]
    assert [{path.name for path in (node.disk / "run/step-10").iterdir()} for node in cluster.nodes] == before
    anew = call(state.load_and_save, kinds=SAVED, checkpoint_id="run/step-10", as_id="run/step-11")
    assert cluster.run(anew, nodes=[0, 1, 2]) == [saved] * 3
    cluster.nodes[0].lose()
    for nodes in ([1, 2], [0, 2, 1]):
        results = cluster.launch([load("run/step-11")], nodes=nodes)
        assert results.of(state.load).digests() == [saved] * len(nodes)
        assert results.all_warnings == []


@pytest.mark.fault
def test_missing_or_contradictory_stock_files_raise_on_every_rank(cluster_of: ClusterOf) -> None:
    """A lost node raises ShardLost, and files of two runs under one id raise CheckpointAmbiguous, on every rank."""
    cluster = cluster_of(3)
    scattered(cluster, "step-10")
    fails = call(state.load_fails, kinds=["plain"], checkpoint_id="step-10")
    lost_shards = sorted(path.name for path in (cluster.nodes[2].disk / "step-10").iterdir())
    (cluster.nodes[2].disk / "step-10").rename(cluster.nodes[2].disk / "aside")
    for failure in cluster.run(fails, nodes=[0, 1, 2]):
        assert (failure["types"], failure["shards"]) == (["ShardLost"], lost_shards)
        assert len(failure["searched"]) == 3
    (cluster.nodes[2].disk / "aside").rename(cluster.nodes[2].disk / "step-10")
    shutil.copytree(cluster.nodes[0].disk / "step-10", cluster.nodes[2].disk / "step-10", dirs_exist_ok=True)
    flip(cluster.nodes[2].disk / "step-10" / ".metadata")
    for failure in cluster.run(fails, nodes=[2, 0, 1]):
        assert failure["types"] == ["CheckpointAmbiguous"]
        assert ".metadata" in failure["message"]
