"""The harness itself: worlds have the shape that was asked for, and what hangs or fails is seen and ended."""

import pytest

from tests.multiprocess.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.multiprocess.processes import is_running, processes_of


def test_a_world_has_the_shape_that_was_asked_for(cluster_of: ClusterOf) -> None:
    """Ranks are numbered along the nodes as listed, torchrun or not, and end with their launch."""
    cluster = cluster_of(2)
    direct = cluster.launch([call("harness.where")], nodes=[1, 0], ranks=[1, 2])
    assert [(value["rank"], value["node"]) for value in direct.of(0)] == [(0, 1), (1, 0), (2, 0)]
    torchrun = cluster.launch([call("harness.where")], nodes=[1, 0], launcher="torchrun")
    assert [(value["rank"], value["node"]) for value in torchrun.of(0)] == [(0, 1), (1, 0)]
    assert not any(is_running(value["pid"]) for value in [*direct.of(0), *torchrun.of(0)])


def test_a_hanging_rank_fails_with_its_stack(cluster_of: ClusterOf) -> None:
    """A hang ends at the time-out, the message shows where each rank was, and no process is left."""
    cluster = cluster_of(2)
    with pytest.raises(AssertionError, match="hung") as failure:
        cluster.launch([call("harness.hang")], nodes=[0, 1], timeout_s=12)
    assert "a_place_to_hang" in str(failure.value)
    assert processes_of(cluster.marker) == []


def test_a_failing_rank_fails_with_its_traceback(cluster_of: ClusterOf) -> None:
    """One rank's error is the test's error, though the other ranks wait for it."""
    cluster = cluster_of(2)
    calls = [call("harness.raise_on", rank=1), call("loss.lose", nodes=[])]
    with pytest.raises(AssertionError, match="rank 1 raises on purpose"):
        cluster.launch(calls, nodes=[0, 1])
    assert processes_of(cluster.marker) == []
