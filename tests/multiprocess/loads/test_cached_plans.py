"""What ranks tell the coordinator of what they will read: names, unless a planner looks at all plans."""

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
    """Of 1,000 tensors: a few bytes of each name go to the coordinator, and next to nothing comes back."""
    for rank in load(cluster, ALL, [planner] * 2):
        (gather, gathered), (scatter, scattered) = rank["sent"]
        assert (gather, scatter) == ("gather_object", "scatter_object")
        assert gathered < 8 * ITEMS
        assert scattered < 1024
        assert rank["warned"] == []


def test_a_planner_that_looks_at_all_plans_sees_them(cluster: Cluster) -> None:
    """One with a `create_global_plan` of its own gets every rank's items, as from stock torch."""
    first, second = load(cluster, [[0, ITEMS], [0, 10]], ["looks", "looks"])
    assert first["looked_at"] == [ITEMS, 10]
    assert first["sent"][1][1] > 100 * ITEMS
    assert first["warned"] == second["warned"] == []


def test_planners_of_two_kinds_are_refused_where_one_would_miss_plans(cluster: Cluster) -> None:
    """The coordinator's looks at items that another rank kept: every rank is told so; the next load is none the worse."""
    for rank in load(cluster, ALL, ["looks", "stock"]):
        assert "ConfigInvalid" in str(rank)
        assert "planners of one class" in str(rank)
    assert all("sent" in rank for rank in load(cluster, ALL, ["stock", "stock"]))


def test_what_no_rank_asks_for_is_told_by_their_names(cluster: Cluster) -> None:
    """Two ranks that ask for two parts leave the rest: rank 0 warns of that much, and of no name that one of them has."""
    first, second = load(cluster, [[0, 400], [300, 900]], ["stock", "stock"])
    [warned] = first["warned"]
    assert "does not load 100 of 1000 saved entries" in warned
    assert second["warned"] == []
