"""A node whose root became read-only: its checkpoints still load, whether an agent runs there or not."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from tests.cli.commands import as_json
from tests.harness.cluster import Call, Cluster, call
from tests.marks import mark_long
from tests.steps import lookup, state
from tests.steps.errors import timed

pytestmark = [
    pytest.mark.fault,
    pytest.mark.multiprocess,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="a read-only file system is a tmpfs, and mounting one needs root"),
]
KINDS = ["plain", "own"]
SOON_S = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes; the root of the second one is a separate file system."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        disk = cluster.nodes[1].disk
        mounted = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(disk)]
        if subprocess.run(mounted, check=False, capture_output=True).returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            yield cluster
            cluster.stop_agents()
        finally:
            while disk.is_mount():
                subprocess.run(["umount", "--lazy", str(disk)], check=True)


def make_read_only(cluster: Cluster) -> None:
    """Simulates a file system that went read-only after an error: a running agent keeps its open files."""
    disk = str(cluster.nodes[1].disk)
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True)


def load(checkpoint_id: str) -> Call[Any]:
    return timed(call(state.load, kinds=KINDS, checkpoint_id=checkpoint_id))


@pytest.mark.parametrize("nodes", mark_long([[0, 1], [1, 0], [1]], keep=[[0, 1]]), ids=str)
def test_loads_work_from_a_read_only_root(cluster: Cluster, nodes: list[int]) -> None:
    """No agent runs on the read-only node, and none can start there: its ranks read their own disk, whichever node
    coordinates.
    """
    counts = [1 if node == 0 else 2 for node in nodes]
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=nodes, ranks=counts)
    cluster.stop_agents()
    make_read_only(cluster)
    ask = call(lookup.ask, names=["step-1", "step-2"])
    by_name, latest = load("step-1"), load("latest")
    results = cluster.launch([by_name, latest, ask], nodes=nodes, ranks=counts)
    for each in (by_name, latest):
        assert [found["value"]["digests"] for found in results.of(each)] == saved
        assert max(found["seconds"] for found in results.of(each)) < SOON_S
    for rank, found in enumerate(results.of(by_name)):
        if nodes[0 if rank < counts[0] else 1] == 1:
            assert found["value"]["report"]["bytes_peer"] == 0, "the rank read from a peer, not its own disk"
    assert results.of(ask)[0]["latest"] == "step-1"
    assert results.of(ask)[0]["exists"] == [True, False]


def test_an_agent_that_still_runs_there_serves_the_others(cluster: Cluster) -> None:
    """The other node lost everything: it loads from the agent that still runs on the read-only root."""
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1])
    cluster.nodes[0].lose()
    make_read_only(cluster)
    results = cluster.run(load("step-1"), nodes=[0, 1])
    assert [found["value"]["digests"] for found in results] == saved


def test_a_shard_on_a_node_without_an_agent_is_named(cluster: Cluster) -> None:
    """No other node can read that shard: every rank soon gets ShardLost, which says why the node cannot be asked."""
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="step-1", copies=1)], nodes=[0, 1])
    cluster.stop_agents()
    make_read_only(cluster)
    for failure in cluster.run(call(state.load_fails, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1]):
        assert failure["types"] == ["ShardLost"]
        assert failure["seconds"] < SOON_S
        assert "cannot be written, and no agent runs there" in failure["message"]


def test_a_save_to_a_read_only_root_fails_on_every_rank(cluster: Cluster) -> None:
    """Within seconds every rank gets StoreDenied, with the rank that met the error."""
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="step-1")], nodes=[0, 1])
    cluster.stop_agents()
    make_read_only(cluster)
    for failure in cluster.run(call(state.save_fails, kinds=KINDS, checkpoint_id="step-2"), nodes=[0, 1]):
        assert (failure["types"], failure["ranks"]) == (["StoreDenied"], [1])
        assert failure["seconds"] < SOON_S


def test_status_reports_a_read_only_root(cluster: Cluster) -> None:
    """All copies are intact, but the next save would fail: `status` reports "degraded" on both nodes."""
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="step-1")], nodes=[0, 1])
    make_read_only(cluster)
    for node in cluster.nodes:
        code, found = as_json("status", "--root", node.disk)
        assert (code, found["state"]) == (ExitCode.FAILED, "degraded")
        assert any("its root cannot be written: Read-only file system" in why for why in found["reasons"])
        assert sorted(one["room"]["is_writable"] for one in found["nodes"]) == [False, True]
