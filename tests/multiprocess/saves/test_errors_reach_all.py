"""An error or a kill of one rank, in any hook of a save or a load, reaches every rank within seconds."""

import itertools

import pytest

from tests.harness.cluster import call
from tests.marks import long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import errors
from tests.steps.errors import ERRORS, PLACES, PLANNERS

pytestmark = pytest.mark.fault

SOON_S = 10.0
BY_COORDINATOR = {
    *("save: open", "save: number", "save: weigh", "save: collect", "save: finish"),
    *("load: look", "load: plan"),
    *("save: merge plans", "load: merge plans"),
}
BEFORE_DCP = {"load: present", "load: look"}
"""Hooks before DCP's first collective: each rank raises by itself."""
WITH_PLANNER = {"save: write", "save: written", "save: receipt", "save: post", "load: read", *PLANNERS}
"""Planners, and hooks that call one: a planner's error is passed on unchanged, and the test's error counts as its."""
CASES = [
    (place, error, rank)
    for place, error in itertools.product(PLACES, ERRORS)
    for rank in ((0,) if place in BY_COORDINATOR else (1,))
    if place != "load: reset"  # our code does not run yet: only the end of the process can be noticed
]
SOME = [*CASES[::5], ("save: set up planner", "Unsendable", 1)]
"""Some errors in every hook, and every error in some hook."""
TYPED = {
    "EROFS": "StoreDenied",
    "EMFILE": "StoreError",
    "ENOSPC": "StoreFull",
    "EACCES": "StoreDenied",
    "EIO": "StoreError",
}
"""Our errors for those of the operating system, in hooks that run no user code."""


def expected(case: tuple[str, str, int], at: int) -> str:
    """The type of the error that rank `at` raises by itself, or finds in DCP's exception."""
    place, error, rank = case
    if place not in WITH_PLANNER and error in TYPED:
        return TYPED[error]
    if error == "Unsendable" and place not in BEFORE_DCP:
        return "RankFailed"
    if place in BEFORE_DCP and at != rank:
        return "RankFailed"
    return type(ERRORS[error]()).__name__


@pytest.mark.timeout(480)
@pytest.mark.parametrize("cases", [SOME, long(CASES)], ids=["some", "all"])
def test_any_error_at_one_rank_reaches_all(cluster_of: ClusterOf, cases: list[tuple[str, str, int]]) -> None:
    """Errors of the system, of Python and unpicklable ones, in every hook: all ranks raise, and the next operation
    works.

    A failed save leaves nothing staged on any node.
    """
    cluster = cluster_of(2, quick_exit=False)
    calls = [call(errors.save_kept), call(errors.breaks_in_turn, cases=cases)]
    results = cluster.launch(calls, nodes=[0, 1], ranks=[1, 2], timeout_s=420)
    for number, case in enumerate(cases):
        place, _, rank = case
        for at, outcome in enumerate(outcomes[number] for outcomes in results.of(errors.breaks_in_turn)):
            is_raised_by_dcp = place not in BEFORE_DCP
            assert outcome["seconds"] < SOON_S, (case, at, outcome)
            assert (outcome["caught"] == "CheckpointException") == is_raised_by_dcp, (case, at, outcome)
            found = {who: what for who, what in outcome["told"].items() if what != "SaveAborted"}  # aborted meanwhile
            assert found == {str(rank if is_raised_by_dcp else at): expected(case, at)}, (case, at, outcome)
            assert outcome["staged"] == [], (case, at, outcome)


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("load: reset", 2),
        long("load: look", 0),
        long("load: read", 1),
        ("save: write", 2),
        *(long(place, 0) for place in sorted(BY_COORDINATOR - {"load: look"})),
        *(long(place, 1) for place in sorted(PLACES.keys() - BY_COORDINATOR)),
    ],
)
def test_a_killed_rank_fails_the_others_within_seconds(cluster_of: ClusterOf, place: str, rank: int) -> None:
    """SIGKILL at one rank, in any hook: the others raise within seconds, before the timeout of a collective."""
    cluster = cluster_of(2, quick_exit=False)
    killed = call(errors.breaks, place=place, error="SIGKILL", rank=rank)
    attempt = cluster.attempt([call(errors.save_kept), killed], nodes=[0, 1], ranks=[1, 2], grace_s=2 * SOON_S)
    assert attempt.codes[rank] == -9
    for other in {0, 1, 2} - {rank}:
        assert attempt.of(killed)[other]["seconds"] < SOON_S, attempt


def test_a_killed_coordinator_is_noticed_although_the_c10d_store_lives(cluster_of: ClusterOf) -> None:
    """A rank outside the group serves the c10d store. The others find that the coordinator's process has ended."""
    cluster = cluster_of(2, quick_exit=False)
    killed = call(errors.breaks_in_group, place="load: look", error="SIGKILL", members=[1, 2], rank=1)
    attempt = cluster.attempt([call(errors.save_kept), killed], nodes=[0, 1], ranks=[1, 2], grace_s=2 * SOON_S)
    found = attempt.of(killed)[2]
    assert found is not None
    assert found["caught"] == "RankFailed", found
    assert "rank 0 has ended" in found["text"]
    assert found["seconds"] < SOON_S, found
