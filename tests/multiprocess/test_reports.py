"""What is told of saves and loads of several ranks: to the user's functions on every rank, and to the log of rank 0."""

from replicated_ckpt.dcp.save.save_report import PHASES
from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import peers
from tests.steps import reports as reports_steps

SHARD_BYTES = 8 << 18


def test_every_rank_is_told_after_the_commit_and_rank_0_of_all(cluster_of: ClusterOf) -> None:
    """One call each on every rank, none for a save that fails, and one line each in the log of rank 0."""
    results = cluster_of(2).run(call(reports_steps.save_and_load_telling, checkpoint_id="step-1"), nodes=[0, 1])
    first, second = results
    for rank, told in enumerate((first, second)):
        assert told["same"]
        assert told["is_refused"]
        (saved,), (loaded,) = told["saved"], told["loaded"]
        assert saved["there"], "committed on this rank's node by the time that it is told"
        assert saved["rank"] == loaded["rank"] == rank
        assert set(saved["phases"]) == set(PHASES)
        assert saved["phases"]["send"] > 0
        assert loaded["bytes_local"] + loaded["bytes_peer"] >= SHARD_BYTES
        assert told["failures"] == {"1": "RankFailed"}, "of a planner on rank 1, with an error that cannot be sent"
    (read_by_both,), (read_by_second,) = first["loaded"], second["loaded"]
    assert [one["rank"] for one in read_by_both["ranks"]] == [0, 1], "rank 0 knows what all have read"
    assert sum(one["bytes_local"] + one["bytes_peer"] for one in read_by_both["ranks"]) >= 2 * SHARD_BYTES
    assert read_by_second["ranks"] == []
    (of_both,) = first["saved"]
    assert [one["rank"] for one in of_both["ranks"]] == [0, 1]
    assert all(
        one["bytes_written"] > SHARD_BYTES and one["seconds"] <= of_both["seconds"] + 1 for one in of_both["ranks"]
    )
    assert len({one["node_id"] for one in of_both["ranks"]}) == 2
    assert all(set(one["phases"]) == set(PHASES) - {"commit"} for one in of_both["ranks"])
    assert second["lines"] == []
    saved_line, loaded_line = first["lines"]
    assert "2 copies on 2 nodes, 4.2 MB" in saved_line
    assert "slowest rank" in saved_line
    assert "on 2 ranks: 4.2 MB" in loaded_line


def test_rank_0_counts_the_copies_of_an_asynchronous_save_that_are_made(cluster_of: ClusterOf) -> None:
    """Not those that are to be made: with "local" each shard has one then, on every rank's report and in the log."""
    names = ["__0_0.distcp", "__1_0.distcp"]
    made = call(peers.copies_made, checkpoint_id="step-1", names=names, copies=2, within_s=20.0)
    results = cluster_of(2).launch([call(reports_steps.save_async_telling, ack="local"), made], nodes=[0, 1])
    reports = [told["report"] for told in results.of(reports_steps.save_async_telling)]
    assert [report["copies_made"] for report in reports] == [1, 1]
    assert [(one["copies_made"], one["bytes_replicated"]) for one in reports[0]["ranks"]] == [(1, 0)] * 2
    (line,) = results.of(reports_steps.save_async_telling)[0]["lines"]
    assert "1 copy on 2 nodes" in line
