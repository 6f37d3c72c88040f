"""What ranks send the coordinator of their load plans: only names, unless a planner reads all plans."""

from typing import Any

import pytest

from tests.harness.cluster import Cluster, call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import planning

ITEMS = 1000
ALL = [[0, ITEMS], [0, ITEMS]]


@pytest.fixture
def cluster(cluster_of: ClusterOf) -> Cluster:
    cluster = cluster_of(2)
    cluster.launch([call(planning.save_numbered, checkpoint_id="step-1", items=ITEMS)], nodes=[0, 1])
    return cluster


def load(cluster: Cluster, parts: list[list[int]], planners: list[str]) -> list[dict[str, Any]]:
    step = call(planning.count_loaded, checkpoint_id="step-1", parts=parts, planners=planners)
    return cluster.run(step, nodes=[0, 1])


@pytest.mark.parametrize("planner", ["stock", "ours"])
def test_a_rank_keeps_its_plan(cluster: Cluster, planner: str) -> None:
    """Of 1,000 tensors each rank sends the coordinator a few bytes per name, and gets almost nothing back."""
    for rank in load(cluster, ALL, [planner] * 2):
        (gather, gathered), (scatter, scattered) = rank["sent"]
        assert (gather, scatter) == ("gather_object", "scatter_object")
        assert gathered < 8 * ITEMS
        assert scattered < 1024
        assert rank["warned"] == []


def test_a_planner_that_looks_at_all_plans_sees_them(cluster: Cluster) -> None:
    """A planner with its own `create_global_plan` gets every rank's items, as with stock torch."""
    first, second = load(cluster, [[0, ITEMS], [0, 10]], ["looks", "looks"])
    assert first["looked_at"] == [ITEMS, 10]
    assert first["sent"][1][1] > 100 * ITEMS
    assert first["warned"] == second["warned"] == []


def test_different_planner_classes_are_refused_if_one_would_miss_plans(cluster: Cluster) -> None:
    """The coordinator's planner reads all items but another rank's keeps its own: every rank raises. The next load
    works.
    """
    for rank in load(cluster, ALL, ["looks", "stock"]):
        assert "ConfigInvalid" in str(rank)
        assert "planners of one class" in str(rank)
    assert all("sent" in rank for rank in load(cluster, ALL, ["stock", "stock"]))


def test_rank_0_counts_the_entries_that_no_rank_loads(cluster: Cluster) -> None:
    """Two ranks load overlapping parts. Rank 0 warns of the entries in neither part, and of no others."""
    first, second = load(cluster, [[0, 400], [300, 900]], ["stock", "stock"])
    [warned] = first["warned"]
    assert "does not load 100 of 1000 saved entries" in warned
    assert second["warned"] == []
