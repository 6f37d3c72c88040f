"""The metrics of agents after a real save and load, and after a node loss."""

import os
import signal
import time
from collections.abc import Mapping

from replicated_ckpt.agent.state.endpoint import read_endpoint
from tests.agent.agents import wait_for
from tests.agent.scraping import scraped
from tests.harness.cluster import Cluster, call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import state

PHASES = {"save": ("plan", "serialise", "write", "send", "fsync", "commit"), "load": ("plan", "read")}


def metrics_of(cluster: Cluster, node: int, path: str = "/metrics") -> Mapping[str, float]:
    endpoint = read_endpoint(cluster.nodes[node].root / ".agent")
    assert endpoint is not None
    return scraped(endpoint, path)


def test_ranks_report_to_their_own_agents(cluster_of: ClusterOf) -> None:
    """Two nodes with two ranks each save and load. One more load fails. Then a node is lost: the metrics count its
    copies.
    """
    cluster, began = cluster_of(2), time.time()
    soon = {"REPLICATED_CKPT_AGENT_LOST_AFTER_S": "2", "REPLICATED_CKPT_AGENT_ROUND_EVERY_S": "0.5"}
    cluster.start_agents({0: soon, 1: soon})
    calls = [
        call(state.save, kinds=["plain"], checkpoint_id="step-1"),
        call(state.load, kinds=["plain"], checkpoint_id="step-1"),
        call(state.load_fails, kinds=["plain"], checkpoint_id="step-2"),
    ]
    cluster.launch(calls, nodes=[0, 1], ranks=2)
    failed = "errors_total{class=CheckpointNotFound,origin=load}"
    wait_for(lambda: metrics_of(cluster, 1).get(failed) == 2 or None, 20, "the last reports")
    wait_for(lambda: metrics_of(cluster, 0).get("repair_complete") or None, 20, "a look after the save")
    first, second = metrics_of(cluster, 0, "/metrics?cluster=1"), metrics_of(cluster, 1)
    assert (first["saves_total"], second["saves_total"]) == (1, 0)
    assert (first["restores_total"], second["restores_total"]) == (1, 0)
    for found in (first, second):
        for kind, phases in {
            "save": ("plan", "serialise", "write", "send", "fsync", "commit"),
            "load": ("plan", "read"),
        }.items():
            assert found[f"{kind}_duration_seconds_count"] == 2
            assert 0 < found[f"{kind}_duration_seconds_sum"] < 90
            for phase in phases:
                assert found[f"{kind}_phase_duration_seconds_count{{phase={phase}}}"] == 2, phase
        assert found["save_bytes_total{kind=written}"] == found["save_bytes_total{kind=replicated}"] > 0
        assert found["load_bytes_total{kind=local}"] > 0
        assert found[failed] == 2
        assert found["copies_missing"] == found["shards_lost"] == found["divergences_total"] == 0
        for level in ("node", "whole", "copies"):
            assert began - 1 < found[f"last_commit_timestamp_seconds{{level={level}}}"] < time.time() + 1
    up = {name: value for name, value in first.items() if name.startswith("node_up{")}
    assert list(up.values()) == [1, 1]
    stored = sum(value for name, value in first.items() if name.startswith("node_stored_bytes{"))
    assert stored == first["stored_bytes{tier=node}"] + second["stored_bytes{tier=node}"]
    pid = cluster.nodes[1].agent_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    lost = wait_for(lambda: _with_missing(metrics_of(cluster, 0, "/metrics?cluster=1")), 30, "the loss")
    assert sorted(value for name, value in lost.items() if name.startswith("node_up{")) == [0, 1]
    assert "last_commit_timestamp_seconds{level=copies}" not in lost
    assert lost["last_commit_timestamp_seconds{level=whole}"] == first["last_commit_timestamp_seconds{level=whole}"]
    assert lost["shards_lost"] == 0


def _with_missing(found: Mapping[str, float]) -> Mapping[str, float] | None:
    return found if found["copies_missing"] >= 4 else None
