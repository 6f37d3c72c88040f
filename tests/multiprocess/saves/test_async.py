"""`dcp.async_save` keeps the promises of `dcp.save`."""

import sys

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from tests.harness.cluster import call
from tests.harness.launch import COLLECTIVE_TIMEOUT_ENV
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import async_saves, loss, saving, state

KINDS = ["plain", "fsdp2"]
MORE_KINDS = [*KINDS, "ddp", "meshes", "two_dimensional"]
ALLOCATOR_BYTES = 8 << 20
"""Late growth of an allocator. One kept segment per small save would be far more."""


def test_saves_in_the_background(cluster_of: ClusterOf) -> None:
    """The checkpoint has the values at the time of the call when the future is done. The next save follows."""
    ids = ["step-1", "step-2", "step-3"]
    loads = [call(state.load, kinds=MORE_KINDS, checkpoint_id=name) for name in ids]
    save = call(async_saves.save, kinds=MORE_KINDS, checkpoint_ids=ids)
    results = cluster_of(2).launch([save, *loads], nodes=[0, 1])
    for load, saved in zip(loads, results.of(save).agreed(), strict=True):
        assert results.of(load).digests() == [saved, saved]


def test_saves_of_many_writers_take_turns(cluster_of: ClusterOf) -> None:
    """Saves of several writers share one process group and run one after the other: their collectives never mix."""
    ids = ["step-1", "step-2", "step-3"]
    loads = [call(state.load, kinds=["plain"], checkpoint_id=name) for name in ids]
    cluster = cluster_of(2, environment={COLLECTIVE_TIMEOUT_ENV: "20"})
    save = call(saving.save_by_many_writers, kinds=["plain"], checkpoint_ids=ids)
    results = cluster.launch([save, *loads], nodes=[0, 1])
    for load, saved in zip(loads, results.of(save).agreed(), strict=True):
        assert results.of(load).digests() == [saved, saved]


@pytest.mark.long
def test_saves_in_another_process(cluster_of: ClusterOf) -> None:
    """With `AsyncCheckpointerType.PROCESS` the writer is pickled to another process, and its saves load like any other."""
    ids = ["step-1", "step-2"]
    loads = [call(state.load, kinds=KINDS, checkpoint_id=name) for name in ids]
    cluster = cluster_of(2, quick_exit=False)
    save = call(async_saves.save_in_process, kinds=KINDS, checkpoint_ids=ids)
    results = cluster.launch([save, *loads], nodes=[0, 1])
    for load, saved in zip(loads, results.of(save).agreed(), strict=True):
        assert results.of(load).digests() == [saved, saved]
    assert all({"__0_0.distcp", "__1_0.distcp", ".metadata"} <= node.files("step-2") for node in cluster.nodes)


@pytest.mark.long
@pytest.mark.fault
def test_the_saving_process_works_after_a_failed_save(cluster_of: ClusterOf) -> None:
    """One rank's saving process fails: every rank's future fails, nothing stays staged, and the next save succeeds."""
    calls = [
        call(async_saves.save_breaks_in_process, kinds=KINDS, checkpoint_id="step-1", ranks=[1]),
        call(loss.staging_left),
        call(async_saves.save_in_process, kinds=KINDS, checkpoint_ids=["step-2"]),
        call(state.load, kinds=KINDS, checkpoint_id="latest"),
    ]
    results = cluster_of(2, quick_exit=False).launch(calls, nodes=[0, 1])
    for message in results.of(async_saves.save_breaks_in_process):
        assert "this rank breaks in write" in message
    assert results.of(loss.staging_left) == [[], []]
    assert results.of(state.load).digests() == [results.of(async_saves.save_in_process).agreed()[0]] * 2


@pytest.mark.fault
@pytest.mark.parametrize("phase", mark_long(["plan", "write"], keep=["write"]))
def test_an_error_reaches_the_future(cluster_of: ClusterOf, phase: str) -> None:
    """A rank raises in the background: every rank's future fails, and the previous checkpoint loads."""
    calls = [
        call(state.save, kinds=KINDS, checkpoint_id="step-1"),
        call(async_saves.save_breaks, kinds=KINDS, checkpoint_id="step-2", phase=phase, ranks=[1]),
        call(loss.staging_left),
        call(state.load, kinds=KINDS, checkpoint_id="latest"),
    ]
    results = cluster_of(2).launch(calls, nodes=[0, 1])
    assert [failure["ranks"] for failure in results.of(async_saves.save_breaks)] == [[1], [1]]
    assert results.of(loss.staging_left) == [[], []]
    assert results.of(state.load).digests() == results.of(state.save)


@pytest.mark.fault
def test_a_rank_interrupted_while_it_stages_fails_the_others(cluster_of: ClusterOf) -> None:
    """The other ranks have begun the save. They raise within seconds, before their process group's timeout."""
    save = call(async_saves.save_interrupted, rank=1)
    results = cluster_of(2, quick_exit=False).run(save, nodes=[0, 1], ranks=[1, 2])
    assert [each["type"] for each in results] == ["RankFailed", "KeyboardInterrupt", "RankFailed"], results
    assert all("Rank 1 left an asynchronous save before it began" in results[rank]["text"] for rank in (0, 2)), results
    assert all(each["seconds"] < 10 for each in results), results


@pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info < (3, 12, 3),
    reason="this Python starts no thread during its shutdown",
)
def test_a_save_in_flight_at_exit_is_waited_for(cluster_of: ClusterOf) -> None:
    """The interpreter ends during a save: it waits until the save is complete."""
    cluster = cluster_of(2, quick_exit=False)
    leaving = cluster.run(call(async_saves.leave_in_flight, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1])
    assert [left["in_flight"] for left in leaving] == [True, True]
    loaded = cluster.run(call(state.load, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1])
    assert loaded.digests() == leaving.digests()


@pytest.mark.long
def test_a_writer_for_each_save_leaves_nothing_open(cluster_of: ClusterOf) -> None:
    """A writer that is dropped after its save closes its descriptors, on every rank.

    Connections that are kept for the next save open one by one during the first saves, in no fixed order.
    """
    saves = call(async_saves.descriptors_of_saves, saves=24)
    for counts in cluster_of(2).run(saves, nodes=[0, 1], timeout_s=280.0):
        assert min(counts[-6:]) <= max(counts[6:12]) + 2, counts


def test_a_kept_writer_closes_the_connections_of_its_saves(cluster_of: ClusterOf) -> None:
    """No rank keeps one: an agent has a thread for each connection, and takes no shards if it has many."""
    cluster = cluster_of(2)
    results = cluster.run(call(async_saves.connections_of_kept_writers, saves=5), nodes=[0, 1])
    for counts in results:
        assert counts[-1] <= counts[0] + 1, counts
    assert main(["verify", "--root", str(cluster.nodes[0].disk), "step-4"]) in (ExitCode.OK, ExitCode.UNREACHABLE)


@pytest.mark.long
def test_workers_forked_during_a_save_do_not_block_saves(cluster_of: ClusterOf) -> None:
    """Forked workers inherit the save's locks and connections and live on. Agents still end each save, and the next one
    begins.
    """
    forks = call(async_saves.saves_with_forks, kinds=KINDS, saves=3)
    results = cluster_of(2).launch([forks, call(state.load, kinds=KINDS, checkpoint_id="latest")], nodes=[0, 1])
    for saved, loaded in zip(results.of(forks), results.of(state.load).digests(), strict=True):
        assert saved["workers"] > 0
        assert saved["is_start_free"]
        assert saved["open"][-1] <= saved["open"][0] + 1, saved
        assert loaded == saved["digests"]


@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("saves", "mebibytes"), mark_long([(300, 50), (16, 8)], keep=[(16, 8)]))
def test_many_saves_use_no_more_memory_than_a_few(cluster_of: ClusterOf, saves: int, mebibytes: int) -> None:
    """At the end, memory, descriptors and threads of ranks and agents are as after a quarter of the saves.

    One memory segment more is allowed: a save that begins while an earlier copy is still in use gets another, which
    stays.
    """
    footprint = call(async_saves.footprint_of_saves, saves=saves, mebibytes=mebibytes)
    quarter = saves // 4
    for found in cluster_of(2).run(footprint, nodes=[0, 1], timeout_s=60.0 + 6.0 * saves):
        early = {name: max(each[name] for each in found[quarter : 2 * quarter]) for name in found[0]}
        late = {name: min(each[name] for each in found[-quarter:]) for name in found[0]}
        for name, count in late.items():
            room = (mebibytes << 20) + ALLOCATOR_BYTES if name.endswith("bytes") else 2
            assert count <= early[name] + room, (name, early, late)
