"""Ranks of one node that need the same bytes: they cross the network once, and nobody depends on who fetches them."""

from tests.multiprocess.cluster import call
from tests.multiprocess.conftest import ClusterOf

COUNT = 12  # MiB for each rank that saved
SAVED = 2 * COUNT << 20
EDGES = 2 * (256 << 10)  # of the two shards: what else is in the last blocks that are needed


def test_each_byte_comes_to_a_node_once(cluster_of: ClusterOf) -> None:
    """Two ranks of a blank node need everything: together they fetch it once, and one that stalls holds nobody up."""
    cluster = cluster_of(2)
    whole = {"checkpoint_id": "step-1", "count": COUNT, "ranks": 2}
    cluster.launch([call("peers.save_pieces", checkpoint_id="step-1", count=COUNT)], nodes=[0, 1])
    cluster.nodes[0].lose()
    results = cluster.launch([call("peers.load_pieces", **whole)], nodes=[0, 1], ranks=[2, 1])
    first, second, there = (value["report"] for value in results.of(0))
    assert all(value["same"] for value in results.of(0))
    assert SAVED <= first["bytes_peer"] + second["bytes_peer"] <= SAVED + EDGES
    assert min(first["bytes_peer"], second["bytes_peer"]) > SAVED // 4
    assert first["bytes_peer"] + first["bytes_shared"] >= SAVED
    assert second["bytes_peer"] + second["bytes_shared"] >= SAVED
    assert (there["bytes_peer"], there["bytes_shared"]) == (0, 0)
    cluster.nodes[0].lose()
    stalling = call("sharing.load_while_one_stalls", **whole, staller=0)
    results = cluster.launch([stalling], nodes=[0, 1], ranks=[2, 1])
    stalled, waiting, _ = results.of(0)
    assert all(value["same"] for value in results.of(0))
    assert waiting["report"]["bytes_peer"] > second["bytes_peer"]
    assert stalled["seconds"] < 60
