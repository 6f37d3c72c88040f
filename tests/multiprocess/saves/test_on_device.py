"""States on a GPU and on the CPU: a checkpoint has the values at the time of the call, in every way to save."""

import signal

import pytest

from tests.fault.killed.test_submitted_saves import await_all
from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import on_device

COMMITTED_WITHIN_S = 60.0
WAYS = ["sync", "async", "overlapped", "overlapped"]
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_state_is_saved_as_it_was(cluster_of: ClusterOf, device: str) -> None:
    """The state changes as soon as it may. In an overlapped save that is before a GPU has copied it."""
    loads = [call(on_device.load, seed=seed, device=device) for seed, _ in enumerate(WAYS)]
    save = call(on_device.save, ways=WAYS, device=device)
    results = cluster_of(2).launch([save, *loads], nodes=[0, 1])
    for rank, saved in enumerate(results.of(save)):
        assert [results.of(load)[rank] for load in loads] == saved


@pytest.mark.fault
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), ON_GPU])
def test_trainers_that_are_killed_lose_nothing_that_was_staged(cluster_of: ClusterOf, device: str) -> None:
    """The agents hold the memory that the GPU copied to: they commit the save after the trainers are killed."""
    cluster = cluster_of(2)
    attempt = cluster.attempt([call(on_device.save_and_die, device=device)], nodes=[0, 1], grace_s=0.0)
    assert -signal.SIGKILL in attempt.codes, attempt
    await_all(cluster, lambda node: "step-0" in node.checkpoints(), COMMITTED_WITHIN_S)
    results = cluster.launch(
        [call(on_device.load, seed=0, device=device), call(on_device.wanted, seed=0, device=device)], nodes=[0, 1]
    )
    assert results.of(on_device.load) == results.of(on_device.wanted)
