"""Ranks of one node that need the same bytes fetch them once together. If one of them fails, the others fetch for
themselves.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster import Cluster, call
from tests.marks import long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import peers, sharing

COUNT = 12  # MiB for each rank that saved
SAVED = 2 * COUNT << 20
EDGES = 2 * (256 << 10)  # rest of the last blocks read of the two shards
STALL_TIMEOUT_S, UNTROUBLED_STALL_S = 2.0, 10.0  # the first where a rank is waited for in vain
UNDISTURBED_S = 4.0  # longest read of one rank on a busy machine


@pytest.fixture
def cluster(cluster_of: ClusterOf) -> Cluster:
    """Two nodes that saved. The first has lost its disk since; it runs three ranks in loads."""
    return loses_a_disk(cluster_of(2))


@pytest.fixture
def slow_to_heal(cluster_of: ClusterOf) -> Cluster:
    """As `cluster`, but replication is so slow that a second load finds the first node as empty as the first load did."""
    return loses_a_disk(cluster_of(2, environment={"REPLICATED_CKPT_AGENT_COPY_MIB_PER_S": "0.001"}))


def loses_a_disk(cluster: Cluster) -> Cluster:
    cluster.launch([call(peers.save_pieces, checkpoint_id="step-1", count=COUNT)], nodes=[0, 1])
    cluster.nodes[0].lose()
    return cluster


def load(cluster: Cluster, trouble: str, at: int = 1, ranks: int = 3, **arguments: Any) -> list[dict[str, Any]]:
    wait_s = STALL_TIMEOUT_S if trouble else UNTROUBLED_STALL_S
    step = call(
        sharing.load_with_trouble,
        checkpoint_id="step-1", count=COUNT, ranks=2, trouble=trouble, at=at, wait_s=wait_s, **arguments,
    )  # fmt: skip
    return cluster.run(step, nodes=[0, 1], ranks=[ranks, 1])


def caches_of(cluster: Cluster) -> list[Path]:
    return [path for node in cluster.nodes for path in node.disk.glob(".agent/cache-*")]


def test_each_byte_comes_to_a_node_once(cluster: Cluster) -> None:
    """The ranks of a blank node fetch every byte once together. Their caches are removed with the load."""
    *blank, there = load(cluster, "")
    assert all(all(value["same"]) for value in [*blank, there])
    reports = [value["report"] for value in blank]
    assert SAVED <= sum(report["bytes_peer"] for report in reports) <= SAVED + EDGES
    assert all(report["bytes_peer"] > SAVED // 6 for report in reports)
    assert all(report["bytes_peer"] + report["bytes_shared"] >= SAVED for report in reports)
    assert (there["report"]["bytes_peer"], there["report"]["bytes_shared"]) == (0, 0)
    assert caches_of(cluster) == []


@pytest.mark.fault
def test_a_stopped_rank_costs_the_others_one_timeout(slow_to_heal: Cluster) -> None:
    """The other ranks wait once and read on while one rank is stopped. When it continues, it gets all its bytes, too.

    The rank continues only after the others have read everything, so none of their bytes came from it, on machines of
    any speed. Their time is compared with a load in which no rank stops.
    """
    undisturbed_s = max(value["seconds"] for value in load(slow_to_heal, "")[:3])
    first, stopped, third, _ = load(slow_to_heal, "stops")
    assert all(all(value["same"]) for value in (first, stopped, third))
    assert stopped["elapsed_s"] > max(first["elapsed_s"], third["elapsed_s"])
    assert max(first["seconds"], third["seconds"]) < STALL_TIMEOUT_S + max(UNDISTURBED_S, 4 * undisturbed_s)
    assert caches_of(slow_to_heal) == []


@pytest.mark.fault
@pytest.mark.parametrize(("trouble", "waited_s"), [("raises", 0.0), long("raises before", STALL_TIMEOUT_S)])
def test_a_failing_rank_fails_the_others_within_one_timeout(cluster: Cluster, trouble: str, waited_s: float) -> None:
    """A rank that raises while it reads fails the others at once. If it raises before, they wait one timeout."""
    outcomes = load(cluster, trouble)
    assert all(outcome["ranks"] == [1] for outcome in outcomes), outcomes
    assert all("breaks" in outcome["message"] for outcome in outcomes)
    assert max(outcome["seconds"] for outcome in outcomes) < waited_s + UNDISTURBED_S
    assert caches_of(cluster) == []


@pytest.mark.fault
def test_a_plan_that_changes_after_the_ranks_agreed_costs_no_timeout(cluster: Cluster) -> None:
    """A planner drops one rank's items in the global plan: that rank fetches for itself, and the others still share."""
    dropped, first, second, _ = load(cluster, "drops", at=0)
    assert dropped["same"].count(True) == len(dropped["same"]) // 2
    assert all(first["same"] + second["same"])
    assert dropped["report"]["bytes_shared"] == 0
    assert first["report"]["bytes_shared"] > 0
    assert max(value["seconds"] for value in (dropped, first, second)) < UNDISTURBED_S
