"""An incomplete upload is no checkpoint for any reader, also on a weak store, which lists the first half of a broken
PUT.
"""

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from tests.agent.agents import wait_for
from tests.buckets.faults import Fault
from tests.buckets.servers import Server
from tests.buckets.weak import WeakStore
from tests.harness.cluster import call
from tests.marks import mark_long
from tests.object_tier.conftest import SiteOf
from tests.object_tier.sites import Site
from tests.steps import objects
from tests.steps.peers import pieces

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(240)]

COUNT = 3  # MiB of each rank
SHARD = "__1_0.distcp"


def stock_load(site: Site, checkpoint_id: str) -> None:
    """Loads with torch's own reader, which looks for `.metadata`."""
    state = {name: value.zero_() for name, value in pieces(0, COUNT, 1).items()}
    reader = FsspecReader(f"{site.url}/{checkpoint_id}", **site.server.storage_options())
    dcp.load(state, storage_reader=reader, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_lost", mark_long([False, True], keep=[True]))
def test_an_upload_that_never_ends_makes_no_checkpoint(moto: Server, site_of: SiteOf, is_lost: bool) -> None:
    """One node's shard is never uploaded, with its node alive or lost: `latest` in the bucket is the checkpoint before."""
    site = site_of(moto, 2)
    site.cluster.launch([site.save("step-1", COUNT, seed=7, copies=1), site.wait(copies=1)], nodes=[0, 1])
    site.faulty.add(Fault("status", method="PUT", key=f"step-2/{SHARD}"))
    fails = site.failing_wait(timeout_s=3, copies=1)
    results = site.cluster.launch([site.save("step-2", COUNT, copies=1), fails], nodes=[0, 1])
    assert "SlowDown" in results.of(fails)[1]["message"]
    wait_for(lambda: "__0_0.distcp" in site.bucket.client.list_keys("step-2/").sizes, 20, "the other shard")
    if is_lost:
        site.cluster.nodes[1].lose()
    assert ".metadata" not in site.bucket.client.list_keys("step-2/").sizes
    with pytest.raises((CheckpointException, FileNotFoundError), match=r"metadata"):
        stock_load(site, "step-2")
    nobody: dict[str, Any] = {"where": site.where, "rootless": True, "count": COUNT, "ranks": 2}
    calls = [
        call(objects.load, checkpoint_id="latest", seed=7, **nobody),
        call(objects.load_fails, checkpoint_id="step-2", **nobody),
    ]
    results = site.cluster.launch(calls, nodes=[0, 1])
    assert all(value["same"] and value["report"]["checkpoint_id"] == "step-1" for value in results.of(objects.load))
    assert all(failure["types"] == ["CheckpointNotFound"] for failure in results.of(objects.load_fails))
    if not is_lost:
        site.faulty.clear()
        site.wait_until_committed("step-2")
        stock_load(site, "step-2")


@pytest.mark.long
@pytest.mark.parametrize("what", ["__0_0.distcp", SHARD, ".manifest.json", ".metadata"])
def test_half_a_put_is_made_again(weak_store: WeakStore, site_of: SiteOf, what: str) -> None:
    """The weak store keeps half of a broken PUT. The agent replaces that object before it commits the checkpoint."""
    site = site_of(weak_store, 2)
    site.cluster.launch([site.save("step-1", COUNT, seed=7), site.wait()], nodes=[0, 1])
    fault = site.faulty.add(Fault("reset", method="PUT", key=f"step-2/{what}", at=700, times=2))
    found = site.cluster.launch([site.save("step-2", COUNT), site.wait()], nodes=[0, 1])
    assert found.of(objects.wait).agreed() == ["step-2"]
    assert fault.fired == 2
    site.lose_all()
    for checkpoint_id, seed in (("latest", 1), ("step-2", 1), ("step-1", 7)):
        results = site.cluster.run(site.load(checkpoint_id, COUNT, 2, seed=seed), nodes=[0, 1])
        assert all(value["same"] for value in results)


@pytest.mark.long
@pytest.mark.parametrize("what", ["__0_0.distcp", ".manifest.json", ".metadata"])
def test_half_a_put_is_never_loaded(weak_store: WeakStore, site_of: SiteOf, what: str) -> None:
    """While the weak store has only half of an object, loads take the checkpoint from the nodes. Without nodes,
    `latest` is the one before.
    """
    site = site_of(weak_store, 2)
    site.cluster.launch([site.save("step-1", COUNT, seed=7), site.wait()], nodes=[0, 1])
    site.faulty.add(Fault("reset", method="PUT", key=f"step-2/{what}", at=300))
    calls = [site.save("step-2", COUNT), site.failing_wait(timeout_s=2)]
    site.cluster.launch(calls, nodes=[0, 1])
    wait_for(lambda: what in site.bucket.client.list_keys("step-2/").sizes, 60, f"half of {what}")
    results = site.cluster.run(site.load("latest", COUNT, 2), nodes=[0, 1])
    assert all(value["same"] and value["report"]["checkpoint_id"] == "step-2" for value in results)
    site.lose_all()
    results = site.cluster.run(site.load("latest", COUNT, 2, seed=7), nodes=[0, 1])
    assert all(value["same"] and value["report"]["checkpoint_id"] == "step-1" for value in results)


@pytest.mark.long
def test_overwriting_on_a_weak_store(weak_store: WeakStore, site_of: SiteOf) -> None:
    """The weak store ignores conditions and checksums. After three saves under one id, every reader loads the third."""
    site = site_of(weak_store, 2)
    for seed in (1, 2, 3):
        site.cluster.launch([site.save("step-1", COUNT, seed=seed, overwrite=True)], nodes=[0, 1])
    wait_for(lambda: not site.uploads(0)["pending"] and not site.uploads(1)["pending"], 60, "the uploads")
    site.lose_all()
    results = site.cluster.run(site.load("step-1", COUNT, 2, seed=3), nodes=[0, 1])
    assert all(value["same"] for value in results)
    assert weak_store.upload_by_id == {}
