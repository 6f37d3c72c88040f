"""Agents and nodes vanish during an upload: other nodes finish it, or the same agents after a restart."""

import pytest

from replicated_ckpt.stores.bucket_client.client import PART_BYTES
from tests.agent.agents import wait_for
from tests.buckets.faults import Fault
from tests.buckets.servers import Server
from tests.harness.cluster import call
from tests.harness.processes import is_running
from tests.marks import mark_long
from tests.object_tier.conftest import SiteOf
from tests.object_tier.sites import Site
from tests.steps import objects

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(240)]

COUNT = 24  # MiB of each rank: two parts
LARGE = 88  # MiB: six parts of the object
LOST_AFTER_S = 3
SHARDS = ("__0_0.distcp", "__1_0.distcp")


def assert_loads_from_the_bucket(site: Site, count: int) -> None:
    """Loses all nodes, and loads on one blank node."""
    site.lose_all()
    (found,) = site.cluster.run(site.load("latest", count, 2), nodes=[0])
    assert found["same"]
    assert found["report"]["bytes_object"] > 0


@pytest.mark.parametrize("victim", mark_long([0, 1], keep=[0]))
def test_a_holder_uploads_for_an_owner_that_is_gone(moto: Server, site_of: SiteOf, victim: int) -> None:
    """The owner's node (also the coordinator's) is lost in the middle of an upload: the node with the second copy
    uploads the shard.
    """
    site = site_of(moto, 2, REPLICATED_CKPT_AGENT_LOST_AFTER_S=LOST_AFTER_S)
    slow = site.faulty.add(Fault("throttle", method="PUT", key=SHARDS[victim], bytes_per_s=1e5))
    site.cluster.launch([site.save("step-1", COUNT)], nodes=[0, 1])
    wait_for(lambda: slow.fired, 20, "the owner's upload")
    wait_for(lambda: site.bucket.client.list_keys("step-1/").sizes, 20, "the other's upload")
    assert site.bucket.save_of("step-1") is None
    site.cluster.nodes[victim].lose()
    site.faulty.clear()
    site.wait_until_committed("step-1")
    assert site.faulty.uploaded_bytes(SHARDS[1 - victim]) < (COUNT + 1) << 20, "the finished shard was not sent again"
    assert_loads_from_the_bucket(site, COUNT)


@pytest.mark.long
def test_an_owner_that_is_slow_is_not_taken_for_gone(moto: Server, site_of: SiteOf) -> None:
    """While the owner's agent answers, no other node uploads its shard, however long that upload takes."""
    site = site_of(moto, 2, REPLICATED_CKPT_AGENT_LOST_AFTER_S=1, REPLICATED_CKPT_AGENT_UPLOAD_MIB_PER_S=4)
    site.cluster.launch([site.save("step-1", COUNT), site.wait()], nodes=[0, 1])
    for shard in SHARDS:
        assert site.faulty.uploaded_bytes(shard) < (COUNT + 1) << 20
    assert_loads_from_the_bucket(site, COUNT)


def parts_done(site: Site, shard: str) -> int:
    return sum(request.status == 200 for request in site.faulty.requests("PUT", key=shard, query="partNumber"))


def kill_agents_in_upload(site: Site) -> None:
    """Kills both agents with SIGKILL after two parts of each shard have arrived."""
    agents = [node.agent_pid() for node in site.cluster.nodes]
    wait_for(lambda: all(parts_done(site, shard) >= 2 for shard in SHARDS), 60, "two parts of each shard")
    assert site.bucket.client.list_keys("step-1/").sizes == {}
    for node in site.cluster.nodes:
        node.kill_agent()
    assert not any(pid is None or is_running(pid) for pid in agents)


def assert_little_was_sent_twice(site: Site) -> None:
    for shard in SHARDS:
        assert site.faulty.uploaded_bytes(shard) <= (LARGE << 20) + 3 * PART_BYTES


@pytest.mark.long
def test_agents_that_restart_without_a_rank_go_on(moto: Server, site_of: SiteOf) -> None:
    """Agents that restart without a rank still have the bucket's credentials: they find the finished parts, and send
    the others.
    """
    site = site_of(moto, 2, REPLICATED_CKPT_AGENT_UPLOAD_MIB_PER_S=16)
    site.cluster.launch([site.save("step-1", LARGE)], nodes=[0, 1])
    kill_agents_in_upload(site)
    site.cluster.start_agents({0: {}, 1: {}})
    site.wait_until_committed("step-1", 90)
    assert_little_was_sent_twice(site)
    assert_loads_from_the_bucket(site, LARGE)


@pytest.mark.long
def test_ranks_that_wait_restart_their_agents(moto: Server, site_of: SiteOf) -> None:
    """If an agent is killed during `wait`, `wait` starts a new one, which continues the upload."""
    site = site_of(moto, 2, REPLICATED_CKPT_AGENT_UPLOAD_MIB_PER_S=16)
    kill = call(objects.kill_agent_in_upload, after_s=3.0)
    found = site.cluster.launch([site.save("step-1", LARGE), kill, site.wait()], nodes=[0, 1])
    assert found.of(kill) == [True, True]
    assert found.of(objects.wait).agreed() == ["step-1"]
    assert_little_was_sent_twice(site)
    assert_loads_from_the_bucket(site, LARGE)


@pytest.mark.long
def test_agents_after_sigterm_go_on_later(moto: Server, site_of: SiteOf) -> None:
    """SIGTERM interrupts an upload within seconds, and the next agent continues it."""
    site = site_of(moto, 2, REPLICATED_CKPT_AGENT_UPLOAD_MIB_PER_S=16)
    site.cluster.launch([site.save("step-1", LARGE)], nodes=[0, 1])
    wait_for(lambda: all(parts_done(site, shard) >= 2 for shard in SHARDS), 60, "two parts of each shard")
    site.cluster.stop_agents()
    site.cluster.start_agents({0: {}, 1: {}})
    site.wait_until_committed("step-1", 90)
    assert_little_was_sent_twice(site)
    assert_loads_from_the_bucket(site, LARGE)
