"""A rank raises during a save: every rank gets the error, nothing stays staged, and earlier checkpoints load."""

import time

import pytest

from tests.harness.cluster import call
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import failing, loss, state

KINDS = ["plain", "own"]
PHASES = [
    ("plan", [0, 2]),
    ("global_plan", [0]),
    ("finish_plan", [1]),
    ("write", [0]),
    ("write", [2]),
    ("commit", [0]),
]
STAGING_GRACE_S = 5.0  # an agent does not remove a save that was opened just now


@pytest.mark.fault
@pytest.mark.parametrize(("phase", "ranks"), mark_long(PHASES, keep=[("write", [2]), ("commit", [0])]))
def test_a_failing_rank_fails_the_save_for_all(cluster_of: ClusterOf, phase: str, ranks: list[int]) -> None:
    """A rank raises in plan, write or commit: every rank gets the error and the rank's number, and the old checkpoint
    loads.
    """
    # After an error in `finish_plan` torch calls no writer until the next save, which then cleans up.
    is_noticed = phase != "finish_plan"
    cluster = cluster_of(3)
    save, again = (
        call(state.save, kinds=KINDS, checkpoint_id="step-1"),
        call(state.save, kinds=KINDS, checkpoint_id="step-2", seed=5),
    )
    load, load_latest, load_again = (
        call(state.load, kinds=["plain"], checkpoint_id=name) for name in ("step-1", "latest", "step-2")
    )
    own = call(
        state.load_integers, sizes={f"rank{rank}": 1000 for rank in range(3)}, checkpoint_id="step-1", kind="own"
    )
    breaks = call(failing.save_breaks, kinds=KINDS, checkpoint_id="step-1", phase=phase, ranks=ranks, overwrite=True)
    breaks_new = call(failing.save_breaks, kinds=KINDS, checkpoint_id="step-2", phase=phase, ranks=ranks)
    left, left_at_last = call(loss.staging_left, within_s=15.0 if is_noticed else 0.0), call(loss.staging_left)
    calls = [save, breaks, breaks_new, left, load, own, load_latest, again, load_again, left_at_last]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    for failure in [*results.of(breaks), *results.of(breaks_new)]:
        assert failure["ranks"] == ranks
        assert f"breaks in {phase}" in failure["message"]
        assert failure["seconds"] < 20
    assert results.of(left_at_last) == [[], [], []]
    if is_noticed:
        assert results.of(left) == [[], [], []]
    saved = {name: value for name, value in results.of(save)[0].items() if name.startswith("plain/")}
    assert results.of(load).digests() == results.of(load_latest).digests() == [saved] * 3
    assert results.of(own).agreed() == {f"rank{rank}": rank + 1 for rank in range(3)}
    resaved = {name: value for name, value in results.of(again)[0].items() if name.startswith("plain/")}
    assert results.of(load_again).digests() == [resaved] * 3 != [saved] * 3


@pytest.mark.fault
def test_a_failed_save_of_an_ended_trainer_is_removed_by_the_next_load(cluster_of: ClusterOf) -> None:
    """Ranks end after a failed save and leave staged files. These are no checkpoint, and the next world's load removes
    them.
    """
    cluster = cluster_of(2)
    calls = [
        call(state.save, kinds=["plain"], checkpoint_id="step-1"),
        call(failing.save_breaks, kinds=["plain"], checkpoint_id="step-2", phase="finish_plan", ranks=[1]),
    ]
    saved = cluster.launch(calls, nodes=[0, 1])
    time.sleep(STAGING_GRACE_S)
    load, left = call(state.load, kinds=["plain"], checkpoint_id="latest"), call(loss.staging_left)
    loaded = cluster.launch([load, left], nodes=[0, 1])
    assert loaded.of(load).digests() == saved.of(state.save)
    assert loaded.of(left) == [[], []]
