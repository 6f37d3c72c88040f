"""The object tier of several nodes: each uploads its own shards, and worlds of any size load lost nodes' shards."""

from typing import Any

import pytest

from tests.buckets.servers import Server
from tests.harness.cluster import call
from tests.object_tier.conftest import SiteOf
from tests.steps import objects, state

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

KINDS = ["plain", "meshes"]
COUNT = 3  # MiB of each rank


def sources(value: dict[str, Any]) -> tuple[int, int, int]:
    """MiB that a load read from its own store, from peers, and from the bucket, rounded down."""
    report = value["report"]
    local, peer, bucket = (report[name] >> 20 for name in ("bytes_local", "bytes_peer", "bytes_object"))
    return local, peer, bucket


def test_all_nodes_are_lost(moto: Server, site_of: SiteOf) -> None:
    """Two nodes of two ranks each save and are lost. Worlds of one and of three ranks load all of it on blank nodes."""
    site = site_of(moto, 2)
    saving = [
        call(state.save, kinds=KINDS, checkpoint_id="step-1", **site.where),
        site.save("step-2", COUNT),
        site.wait(),
    ]
    saved = site.cluster.launch(saving, nodes=[0, 1], ranks=2)
    assert saved.of(objects.wait).agreed() == ["step-1", "step-2"]
    loading = [
        call(objects.load_kinds, kinds=KINDS, checkpoint_id="step-1", where=site.where),
        site.load("latest", COUNT, 4),
    ]
    for nodes, ranks in (([0], 1), ([1, 0], [2, 1])):
        site.lose_all()
        found = site.cluster.launch(loading, nodes=nodes, ranks=ranks)
        assert found.of(objects.load_kinds).digests() == [saved.of(state.save).agreed()] * len(found.reports)
        for value in found.of(objects.load):
            assert value["same"]
            assert value["report"]["checkpoint_id"] == "step-2"
            assert sources(value)[:2] == (0, 0)
        reports = [value["report"] for value in found.of(objects.load)]
        assert all(report["bytes_object"] + report["bytes_shared"] >= (4 * COUNT) << 20 for report in reports)
        fetched = sum(report["bytes_object"] for report in reports) >> 20
        assert fetched == 4 * COUNT * len(nodes), "each byte leaves the bucket once for each node"


@pytest.mark.long
def test_one_node_survives(moto: Server, site_of: SiteOf) -> None:
    """With one copy of each shard, both nodes read the survivor's shards from the survivor, and the others from the
    bucket.
    """
    site = site_of(moto, 2)
    site.cluster.launch([site.save("step-1", COUNT, copies=1), site.wait(copies=1)], nodes=[0, 1], ranks=2)
    site.cluster.nodes[0].lose()
    found = site.cluster.run(site.load("step-1", COUNT, 4), nodes=[0, 1])
    assert all(value["same"] for value in found)
    half = 2 * COUNT
    assert [sources(value) for value in found] == [(0, half, half), (half, 0, half)]


@pytest.mark.long
def test_readers_without_a_store(moto: Server, site_of: SiteOf) -> None:
    """Ranks without a store, in a group and alone, load from the bucket. No agent runs for them."""
    site = site_of(moto, 2)
    site.cluster.launch([site.save("step-1", COUNT), site.wait()], nodes=[0, 1], ranks=2)
    site.lose_all()
    by_name, latest = (site.load(checkpoint_id, COUNT, 4, rootless=True) for checkpoint_id in ("step-1", "latest"))
    for results in (
        site.cluster.launch([latest, by_name], nodes=[0], ranks=2),
        site.cluster.launch([latest, by_name], nodes=[0], launcher="single"),
    ):
        for value in (*results.of(latest), *results.of(by_name)):
            assert value["same"]
            assert sources(value) == (0, 0, 4 * COUNT)
    assert [node.agent_pid() for node in site.cluster.nodes] == [None, None]
