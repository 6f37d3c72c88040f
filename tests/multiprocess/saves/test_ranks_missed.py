"""One of many ranks ends or leaves during a save or a load: each other rank raises soon, and lives on."""

from typing import Any

import pytest

from tests.harness.cluster import call
from tests.harness.launch import Attempt
from tests.marks import long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import missing
from tests.steps.errors import PLACES

pytestmark = pytest.mark.fault

SOON_S = 10.0
MEMBERS = [1, 2, 3, 4]
"""Four of five ranks. Rank 0 serves the c10d store and takes no part."""
BY_COORDINATOR = {
    *("save: open", "save: number", "save: weigh", "save: collect", "save: finish"),
    *("load: look", "load: plan"),
    *("save: merge plans", "load: merge plans"),
}
SOME = [("save: write", 3), ("save: finish", 0)]
ALL = [(place, rank) for place in PLACES for rank in ([0] if place in BY_COORDINATOR else [0, 2, 3])]


def errors_of_survivors(attempt: Attempt, killed: int) -> list[dict[str, Any]]:
    """The result of each surviving rank: RankFailed, within seconds."""
    assert attempt.codes[killed] == -9
    learned, found_by_rank = [], attempt.of(missing.breaks_among_many)
    for other in set(MEMBERS) - {killed}:
        assert other in found_by_rank, attempt.failures[other]
        found = found_by_rank[other]
        assert found is not None
        assert found["seconds"] < SOON_S, found
        assert set(found["told"].values()) == {"RankFailed"}, found
        learned.append(found)
    return learned


@pytest.mark.parametrize(
    ("place", "rank"), [*SOME, *(long(place, rank) for place, rank in ALL if (place, rank) not in SOME)]
)
def test_a_killed_rank_is_named_by_each_of_many(cluster_of: ClusterOf, place: str, rank: int) -> None:
    """Ranks that gloo does not inform, because their neighbours live on, name the killed rank too."""
    cluster, killed = cluster_of(2), MEMBERS[rank]
    step = call(missing.breaks_among_many, place=place, error="SIGKILL", rank=killed, members=MEMBERS)
    for found in errors_of_survivors(cluster.attempt([step], nodes=[0, 1], ranks=[3, 2], grace_s=6 * SOON_S), killed):
        assert f"rank {rank} has ended" in found["text"], found
        if rank != 0:  # a dead coordinator's staged files are removed by agents, a minute later
            assert found["staged"] == []


def test_a_killed_rank_alone_on_its_host_fails_the_others(cluster_of: ClusterOf) -> None:
    """No other rank sees its process. The neighbours in the collective notice the closed connections."""
    cluster, killed = cluster_of(2), 3
    where = "save: write"
    step = call(missing.breaks_among_many, place=where, error="SIGKILL", rank=killed, members=MEMBERS, are_seen=False)
    errors_of_survivors(cluster.attempt([step], nodes=[0, 1], ranks=[3, 2], grace_s=6 * SOON_S), killed)


def test_a_rank_interrupted_in_a_collective_fails_the_others(cluster_of: ClusterOf) -> None:
    """The interrupted rank raises KeyboardInterrupt soon, the others RankFailed. A save in a new group succeeds.

    The old group is out of step: the next save in it raises on every rank at once.
    """
    ranks = 4
    results = cluster_of(2).run(call(missing.interrupted_while_it_waits, slow=3), nodes=[0, 1], ranks=2)
    for rank, (interrupted, again, saved) in enumerate(results):
        for found in (interrupted, again):
            assert found["seconds"] < SOON_S, found
        if rank == 0:
            assert interrupted["caught"] == "KeyboardInterrupt"
        else:
            assert interrupted["types"] == ["RankFailed"], interrupted
            assert "Rank 0 left a collective with KeyboardInterrupt" in interrupted["message"]
        assert again["types"] == ["RankFailed"], again
        assert "process group" in again["hint"], again
        assert saved == {"loaded": [float(other + 1) for other in range(ranks)], "staged": []}


def test_a_rank_that_is_stopped_is_named(cluster_of: ClusterOf) -> None:
    """After the group's timeout every rank names the stopped rank and its process, and no rank that failed since."""
    stopped = 1
    results = cluster_of(1).run(call(missing.stops_among_many, stopped=stopped), nodes=[0], ranks=3)
    for found in results:
        if found:
            assert found["types"] == ["RankFailed"], found
            assert found["message"].startswith(f"Rank {stopped} is stopped, as process {found['pid']}."), found
            assert f"kill -CONT {found['pid']}" in found["hint"], found


def test_our_collectives_work_with_ranks_in_torchs(cluster_of: ClusterOf) -> None:
    """Our collectives send the same messages as torch's.

    A rank that fails before our first hook, and so is in torch's collective, therefore blocks no other.
    """
    ranks = 4
    lengths = [10 ** (rank + 1) for rank in range(ranks)]
    results = cluster_of(1).run(call(missing.take_turns_with_torch), nodes=[0], ranks=ranks)
    for rank, turns in enumerate(results):
        given = {"scattered": [f"{rank}" * 3**rank], "everywhere": lengths, "told": lengths[0], "is_all_gathered": True}
        assert turns == [given] * ranks


LATE = [("save", 0), ("load", 2), ("manager", 1)]


def test_a_late_rank_is_named(cluster_of: ClusterOf) -> None:
    """In any wait: after half a minute one rank logs one line that names the absent ranks."""
    cluster = cluster_of(2)
    waits = [call(missing.waits_for_late, verb=verb, late=late) for verb, late in LATE]
    results = cluster.launch(waits, nodes=[0, 1], ranks=[1, 2])
    for wait, (verb, late) in zip(waits, LATE, strict=True):
        logged = [line for lines in results.of(wait) for line in lines]
        assert len(logged) == 1, (verb, late, logged)
        assert logged[0].endswith(f" for ranks {late}, which are busy or have not made this call"), (verb, late, logged)
