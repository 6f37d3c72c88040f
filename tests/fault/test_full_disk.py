"""A buddy runs out of disk: its copy goes elsewhere; one's own full disk fails the save on every rank and loses nothing."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.multiprocess.cluster import Cluster, call

pytestmark = [
    pytest.mark.fault,
    pytest.mark.multiprocess,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is a tmpfs, and mounting one needs root"),
]
SMALL_DISK_MIB = 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes; the second one's disk is small."""
    with Cluster(tmp_path / "cluster", 3, quick_exit=True) as cluster:
        disk = cluster.nodes[1].disk
        mounted = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m,mode=0700", "tmpfs", str(disk)]
        if subprocess.run(mounted, check=False, capture_output=True).returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            yield cluster
            cluster.stop_agents()
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_buddy_without_space_passes_its_copy_on(cluster: Cluster) -> None:
    """Its own small shard fits, its buddy's large one does not: a third node takes that, and both copies are made."""
    counts = [24, 2, 2]
    calls = [
        call("fault.save_uneven", checkpoint_id="step-1", counts=counts),
        call("fault.load_uneven", checkpoint_id="latest", counts=counts),
    ]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    assert [outcome.get("copies_made") for outcome in results.of(0)] == [2, 2, 2], results.of(0)
    assert results.of(1) == [True, True, True]
    assert {"__0_0.distcp"} <= cluster.nodes[2].files("step-1")
    assert [f for node in cluster.nodes for f in findings(LocalStore(node.disk)) if f.problem.value == "corrupt"] == []


def test_a_full_disk_of_ones_own_fails_the_save_for_all(cluster: Cluster) -> None:
    """Every rank is told StoreFull and where; the checkpoint before it loads, and so does the next one that fits."""
    small, large = [2, 2, 2], [2, 30, 2]
    calls = [
        call("fault.save_uneven", checkpoint_id="step-1", counts=small),
        call("fault.save_uneven", checkpoint_id="step-2", counts=large),
        call("fault.load_uneven", checkpoint_id="latest", counts=small),
        call("fault.save_uneven", checkpoint_id="step-3", counts=small),
        call("fault.load_uneven", checkpoint_id="step-3", counts=small),
        call("fault.litter", within_s=10.0),
    ]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    for outcome in results.of(1):
        assert outcome["types"] == ["StoreFull"]
        assert str(cluster.nodes[1].disk) in outcome["message"]
    assert results.of(2) == results.of(4) == [True, True, True]
    assert results.of(5) == [[], [], []]
