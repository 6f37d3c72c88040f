"""Reports of saves and loads on several ranks: callbacks run on every rank, and rank 0 logs one line each."""

from replicated_ckpt.dcp.save.save_report import PHASES
from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import peers
from tests.steps import reports as reports_steps

SHARD_BYTES = 8 << 18


def test_each_rank_gets_its_report_after_the_commit_and_rank_0_gets_all(cluster_of: ClusterOf) -> None:
    """Every rank's callback runs once per save and load, and not for a failed save. Rank 0 logs one line for each."""
    results = cluster_of(2).run(call(reports_steps.save_and_load_telling, checkpoint_id="step-1"), nodes=[0, 1])
    first, second = results
    for rank, found in enumerate((first, second)):
        assert found["same"]
        assert found["is_refused"]
        (saved,), (loaded,) = found["saved"], found["loaded"]
        assert saved["there"], "this rank's node has the committed checkpoint when its callback runs"
        assert saved["rank"] == loaded["rank"] == rank
        assert set(saved["phases"]) == set(PHASES)
        assert saved["phases"]["send"] > 0
        assert loaded["bytes_local"] + loaded["bytes_peer"] >= SHARD_BYTES
        assert found["failures"] == {"1": "RankFailed"}, "the planner of rank 1 raised an error that cannot be pickled"
    (read_by_both,), (read_by_second,) = first["loaded"], second["loaded"]
    assert [one["rank"] for one in read_by_both["ranks"]] == [0, 1], "rank 0 has what every rank read"
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


def test_reports_of_an_asynchronous_save_count_the_copies_made_so_far(cluster_of: ClusterOf) -> None:
    """The report and the log count the copies that exist: with ack="local" each shard has one at that time."""
    names = ["__0_0.distcp", "__1_0.distcp"]
    made = call(peers.copies_made, checkpoint_id="step-1", names=names, copies=2, within_s=20.0)
    results = cluster_of(2).launch([call(reports_steps.save_async_telling, ack="local"), made], nodes=[0, 1])
    reports = [found["report"] for found in results.of(reports_steps.save_async_telling)]
    assert [report["copies_made"] for report in reports] == [1, 1]
    assert [(one["copies_made"], one["bytes_replicated"]) for one in reports[0]["ranks"]] == [(1, 0)] * 2
    (line,) = results.of(reports_steps.save_async_telling)[0]["lines"]
    assert "1 copy on 2 nodes" in line
