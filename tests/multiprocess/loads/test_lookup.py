"""`exists`, `latest` and ids that differ by rank have one answer on every rank."""

import pytest

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import lookup, state


def test_lookups_agree_on_all_ranks(cluster_of: ClusterOf) -> None:
    """Before a save lookups find nothing, afterwards the newest. A blank node gets the same answers, also for one rank
    alone.
    """
    cluster = cluster_of(2)
    ask_first, ask = (call(lookup.ask, names=["step-1", "step-2"]) for _ in range(2))
    save = call(state.save, kinds=["meshes"], checkpoint_id="step-1")
    before = cluster.launch([ask_first, save, ask, call(lookup.ask_by_own_name)], nodes=[0, 1], ranks=2)
    nothing = {"latest": None, "exists": [False, False], "on own disk": [False, False]}
    assert before.of(ask_first).agreed() == nothing
    assert before.of(ask).agreed() == {"latest": "step-1", "exists": [True, False], "on own disk": [True, False]}
    assert before.of(lookup.ask_by_own_name).agreed() == "CheckpointIdMismatch"
    cluster.nodes[1].lose()
    after = cluster.launch([ask, call(lookup.ask_alone, rank=2)], nodes=[0, 1], ranks=2)
    assert [value["on own disk"][0] for value in after.of(ask)] == [True, True, False, False]
    assert [value["latest"] for value in after.of(ask)] == ["step-1"] * 4
    assert [value["exists"] for value in after.of(ask)] == [[True, False]] * 4
    assert after.of(lookup.ask_alone) == [None, None, "step-1", None]


def test_the_coordinators_id_is_taken_on_request(cluster_of: ClusterOf) -> None:
    """Ranks with different timestamps, paths outside the root and no id save one checkpoint, under rank 0's id."""
    cluster = cluster_of(2)
    stamped = ["out/11-59-59/checkpoint-5", "out/12-00-00/checkpoint-5"]
    ids = [*stamped, "/elsewhere/checkpoint-5", None]
    calls = [call(lookup.save_under_the_coordinators_id, ids=ids), call(lookup.ask, names=stamped)]
    results = cluster.launch(calls, nodes=[0, 1], ranks=2)
    assert results.of(lookup.save_under_the_coordinators_id).agreed() == ids[0]
    assert [value["exists"] for value in results.of(lookup.ask)] == [[True, False]] * 4
    assert all(sorted(path.name for path in (node.disk / "out").iterdir()) == ["11-59-59"] for node in cluster.nodes)


def test_only_rank_0_warns_of_entries_that_no_rank_loads(cluster_of: ClusterOf) -> None:
    """Rank 0 warns once of the entries that no rank loads. With `expect_partial` there is no warning."""
    cluster = cluster_of(2)
    names = [["a.b"], ["a.c"]]
    save = call(lookup.save_names, names=["a.b", "a.c", "a.d", "e.f"])
    load, load_part = (
        call(lookup.load_own_names, names=names),
        call(lookup.load_own_names, names=names, expect_partial=True),
    )
    results = cluster.launch([save, load, load_part], nodes=[0, 1])
    [warning], others = results.warnings_of(load)
    assert "does not load 2 of 4 saved entries, under 'a.d' (1), 'e' (1)." in warning
    assert others == []
    assert results.warnings_of(load_part) == [[], []]


def test_programs_for_stock_storage_can_catch_a_missing_checkpoint(cluster_of: ClusterOf) -> None:
    """Programs catch a missing checkpoint and read metadata on one rank.

    A load with another `coordinator_rank` than 0 works, and a save with one raises.
    """
    cluster = cluster_of(2)
    calls = [
        call(lookup.save_names, names=["a"]),
        call(lookup.catch_missing),
        call(lookup.load_coordinated_by, rank=1),
        call(lookup.save_coordinated_by, rank=1),
    ]
    results = cluster.launch(calls, nodes=[0, 1])
    missing = ["CheckpointNotFound"]
    assert results.of(lookup.catch_missing) == [{"types": missing, "names": []}, {"types": missing, "names": ["a"]}]
    assert results.of(lookup.load_coordinated_by).agreed() == 4.0
    for outcome in results.of(lookup.save_coordinated_by):
        assert outcome["types"] == ["ConfigInvalid"], outcome
        assert "coordinator_rank" in outcome["hint"], outcome


@pytest.mark.parametrize("ids", [["step-1", None], [None, "step-1"]])
def test_a_rank_without_an_id_ends_the_load_on_all(cluster_of: ClusterOf, ids: list[str | None]) -> None:
    """DCP takes a rank without an id into its first step. All ranks raise there and name that rank.

    An id that the reader got beforehand is used for the missing one.
    """
    cluster = cluster_of(2)
    refused = call(lookup.load_under_ids, ids=ids)
    missing = call(lookup.load_under_ids, ids=["step-9" if each else None for each in ids], set_before="step-9")
    loaded = call(lookup.load_under_ids, ids=ids, set_before="step-1")
    results = cluster.launch([call(lookup.save_names, names=["a"]), refused, missing, loaded], nodes=[0, 1])
    for outcome in results.of(refused):
        assert set(outcome["types"]) == {"ConfigInvalid"}, outcome
        assert f"no checkpoint_id on rank {ids.index(None)}" in outcome["message"], outcome
    assert [set(outcome["types"]) for outcome in results.of(missing)] == [{"CheckpointNotFound"}] * 2
    assert results.of(loaded).agreed() == {"types": [], "sum": 4.0}
