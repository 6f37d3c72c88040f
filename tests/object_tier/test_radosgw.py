"""The object tier on Ceph, a real S3 server, which verifies checksums and lists unfinished uploads."""

import pytest

from replicated_ckpt.stores.bucket_client.client import PART_BYTES
from tests.agent.agents import wait_for
from tests.buckets.faults import Fault
from tests.buckets.servers import Server
from tests.harness.cluster import call
from tests.object_tier.conftest import SiteOf
from tests.object_tier.sites import Site
from tests.steps import objects, state

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault]

COUNT = 72  # MiB of each rank: five parts
SHARD = "__1_0.distcp"


def assert_loads_on_blank_nodes(site: Site) -> None:
    site.lose_all()
    results = site.cluster.run(site.load("latest", COUNT, 2), nodes=[0, 1])
    for value in results:
        assert value["same"]
        assert value["report"]["bytes_object"] > 2 * COUNT << 20
        assert value["report"]["bad_copies"] == []


def test_save_wait_lose_load(radosgw: Server, site_of: SiteOf) -> None:
    """Two nodes of two ranks save one id twice and are lost. Worlds of three ranks and one load the second save. The
    bucket has no unfinished upload.
    """
    site = site_of(radosgw, 2)
    kinds = ["plain", "meshes"]
    writer = {"overwrite": True, **site.where}
    first, second = (call(state.save, kinds=kinds, checkpoint_id="step-1", seed=seed, **writer) for seed in (1, 2))
    saved = site.cluster.launch([first, second, site.wait(overwrite=True)], nodes=[0, 1], ranks=2).of(second).agreed()
    load = call(objects.load_kinds, kinds=kinds, checkpoint_id="latest", where=site.where)
    for nodes, ranks in (([0, 1], [2, 1]), ([1], 1)):
        site.lose_all()
        found = site.cluster.run(load, nodes=nodes, ranks=ranks)
        assert found.digests() == [saved] * len(found)
    left = site.server.client().list_multipart_uploads(Bucket=site.name)
    assert not left.get("Uploads")


def test_a_flipped_bit_is_refused_and_sent_again(radosgw: Server, site_of: SiteOf) -> None:
    """A bit of a part flips in transit: the server refuses the part by the checksum from the save, and the agent sends
    it again.
    """
    site = site_of(radosgw, 2)
    flip = site.faulty.add(Fault("flip_request", method="PUT", key=SHARD, query="partNumber=2", times=1))
    found = site.cluster.launch([site.save("step-1", COUNT), site.wait()], nodes=[0, 1])
    assert found.of(objects.wait).agreed() == ["step-1"]
    assert flip.fired == 1
    (refused,) = [request.status for request in site.faulty.requests("PUT", key=SHARD) if request.fault]
    assert refused == 400
    assert site.faulty.uploaded_bytes(SHARD) <= (COUNT << 20) + 5 * PART_BYTES
    assert_loads_on_blank_nodes(site)


def test_a_flipped_bit_of_a_small_object_is_refused(radosgw: Server, site_of: SiteOf) -> None:
    """The same for a manifest, a commit mark, and a shard of one part."""
    site = site_of(radosgw, 2)
    names = ("__0_0.distcp", ".manifest.json", ".metadata")
    flips = [site.faulty.add(Fault("flip_request", method="PUT", key=name, times=1)) for name in names]
    found = site.cluster.launch([site.save("step-1", 3), site.wait()], nodes=[0, 1])
    assert found.of(objects.wait).agreed() == ["step-1"]
    assert [flip.fired for flip in flips] == [1, 1, 1]
    assert {request.status for request in site.faulty.requests("PUT") if request.fault} == {400}
    site.lose_all()
    assert all(value["same"] for value in site.cluster.run(site.load("latest", 3, 2), nodes=[0, 1]))


def test_parts_that_are_there_are_not_sent_again(radosgw: Server, site_of: SiteOf) -> None:
    """The server vanishes after some parts and the agents die: after both restart, agents send only the missing parts."""
    site = site_of(radosgw, 2, REPLICATED_CKPT_AGENT_UPLOAD_MIB_PER_S=16)
    site.cluster.launch([site.save("step-1", COUNT)], nodes=[0, 1])

    def parts_done() -> int:
        return sum(request.status == 200 for request in site.faulty.requests("PUT", key=SHARD, query="partNumber"))

    wait_for(lambda: parts_done() >= 2, 60, "two parts")
    site.faulty.away()
    for node in site.cluster.nodes:
        node.kill_agent()
    site.faulty.back()
    site.cluster.start_agents({0: {}, 1: {}})
    site.wait_until_committed("step-1", 90)
    assert site.faulty.uploaded_bytes(SHARD) <= (COUNT << 20) + 3 * PART_BYTES
    assert_loads_on_blank_nodes(site)
