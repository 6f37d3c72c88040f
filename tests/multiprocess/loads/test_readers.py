"""Who can read a checkpoint: stock torch, one process without a group, a blank node; and what "latest" is."""

import shutil

import pytest

from tests.harness.cluster import Call, call
from tests.multiprocess.conftest import ClusterOf

SAVED = ["plain", "fsdp2"]
ALONE = ["plain", "fsdp2:unwrapped"]


def save(checkpoint_id: str, seed: int = 0) -> Call:
    return call("state.save", kinds=SAVED, checkpoint_id=checkpoint_id, seed=seed)


def test_each_nodes_directory_is_a_plain_checkpoint(cluster_of: ClusterOf) -> None:
    """Of a two-node save each node's directory loads through torch's own FileSystemReader, in any world."""
    cluster = cluster_of(2)
    saved = cluster.launch([save("step-1")], nodes=[0, 1]).agreed(0)
    alone = call("saving.load_with_stock_torch", kinds=ALONE, checkpoint_id="step-1")
    for node in (0, 1):
        assert cluster.launch([alone], nodes=[node], launcher="single").of(0) == [saved]
    together = call("saving.load_with_stock_torch", kinds=SAVED, checkpoint_id="step-1")
    assert cluster.launch([together], nodes=[1, 0]).of(0) == [saved, saved]


def test_one_process_without_a_group_loads_a_nodes_store(cluster_of: ClusterOf) -> None:
    """A notebook on either node loads what the two saved, by name and as "latest", and starts no agent for it."""
    cluster = cluster_of(2)
    saved = cluster.launch([save("step-1")], nodes=[0, 1]).agreed(0)
    cluster.stop_agents()
    calls = [call("state.load", kinds=ALONE, checkpoint_id=name) for name in ("step-1", "latest")]
    for node in (0, 1):
        loaded = cluster.launch(calls, nodes=[node], launcher="single")
        assert [loaded.digests(step)[0] for step in (0, 1)] == [saved, saved]
    assert [node.agent_pid() for node in cluster.nodes] == [None, None]


def test_one_process_without_a_group_saves_and_loads(cluster_of: ClusterOf) -> None:
    """`no_dist=True` on one process saves one copy, and any world loads it."""
    cluster = cluster_of(2)
    saving = call("saving.save_without_group", kinds=["plain", "unwrapped"], checkpoint_id="step-1")
    loading = call("state.load", kinds=["plain", "unwrapped"], checkpoint_id="latest")
    saved = cluster.launch([saving, loading], nodes=[0], launcher="single")
    assert saved.digests(1) == saved.of(0)
    plain = {name: value for name, value in saved.of(0)[0].items() if name.startswith("plain/")}
    loaded = cluster.launch([call("state.load", kinds=["plain"], checkpoint_id="step-1")], nodes=[1, 0])
    assert loaded.digests(0) == [plain, plain]


@pytest.mark.long
def test_one_rank_loads_alone_while_the_others_are_busy(cluster_of: ClusterOf) -> None:
    """`no_dist=True` on one rank of a living world waits for nobody."""
    cluster = cluster_of(2)
    calls = [
        call("state.save", kinds=["plain"], checkpoint_id="step-1"),
        call("saving.load_alone", kinds=["plain"], checkpoint_id="step-1", ranks=[1]),
        call("saving.load_alone", kinds=["plain"], checkpoint_id="latest", ranks=[0]),
    ]
    results = cluster.launch(calls, nodes=[0, 1])
    saved = results.agreed(0)
    assert results.of(1) == [None, saved]
    assert results.of(2) == [saved, None]


def test_every_rank_agrees_on_the_latest(cluster_of: ClusterOf) -> None:
    """The newest whole checkpoint by the time of its save, on every rank, whatever its own store knows of it."""
    cluster = cluster_of(3)
    kinds = ["plain"]
    saves = [call("state.save", kinds=kinds, checkpoint_id=f"step-{step}", seed=step) for step in (9, 10)]
    saved = cluster.launch(saves, nodes=[0, 1])
    newest = saved.agreed(1)
    load = call("state.load", kinds=kinds, checkpoint_id="latest")
    blank_first = cluster.launch([load], nodes=[2, 0, 1])
    assert blank_first.digests(0) == [newest] * 3
    shutil.rmtree(cluster.nodes[0].disk / "step-10")
    cluster.nodes[0].kill_agent()
    one_is_behind = cluster.launch([load], nodes=[0, 1, 2])
    assert one_is_behind.digests(0) == [newest] * 3
    assert {value["report"]["checkpoint_id"] for value in one_is_behind.of(0)} == {"step-10"}


def test_a_checkpoint_that_does_not_exist_is_said_so(cluster_of: ClusterOf) -> None:
    """Neither a name that was never saved nor "latest" of empty stores hangs or loads anything."""
    calls = [call("state.load_fails", kinds=["plain"], checkpoint_id=name) for name in ("step-1", "latest")]
    results = cluster_of(2).launch(calls, nodes=[0, 1])
    for failure in [*results.of(0), *results.of(1)]:
        assert failure["types"] == ["CheckpointNotFound"]
        assert failure["seconds"] < 20
