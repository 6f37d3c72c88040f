"""Readers of a checkpoint: stock torch, one process without a group, and a blank node. And what "latest" is."""

import shutil
from typing import Any

import pytest

from tests.harness.cluster import Call, call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import saving as saving_steps
from tests.steps import state

SAVED = ["plain", "fsdp2"]
ALONE = ["plain", "fsdp2:unwrapped"]


def save(checkpoint_id: str, seed: int = 0) -> Call[Any]:
    return call(state.save, kinds=SAVED, checkpoint_id=checkpoint_id, seed=seed)


def test_each_nodes_directory_is_a_plain_checkpoint(cluster_of: ClusterOf) -> None:
    """Each node's directory of a two-node save loads through torch's own FileSystemReader, in one process and in two."""
    cluster = cluster_of(2)
    saved = cluster.run(save("step-1"), nodes=[0, 1]).agreed()
    alone = call(saving_steps.load_with_stock_torch, kinds=ALONE, checkpoint_id="step-1")
    for node in (0, 1):
        assert cluster.run(alone, nodes=[node], launcher="single") == [saved]
    together = call(saving_steps.load_with_stock_torch, kinds=SAVED, checkpoint_id="step-1")
    assert cluster.run(together, nodes=[1, 0]) == [saved, saved]


def test_one_process_without_a_group_loads_a_nodes_store(cluster_of: ClusterOf) -> None:
    """A process on either node loads the checkpoint of both, by name and as "latest", and starts no agent."""
    cluster = cluster_of(2)
    saved = cluster.run(save("step-1"), nodes=[0, 1]).agreed()
    cluster.stop_agents()
    by_name, latest = (call(state.load, kinds=ALONE, checkpoint_id=name) for name in ("step-1", "latest"))
    for node in (0, 1):
        loaded = cluster.launch([by_name, latest], nodes=[node], launcher="single")
        assert loaded.of(by_name).digests() == loaded.of(latest).digests() == [saved]
    assert [node.agent_pid() for node in cluster.nodes] == [None, None]


def test_one_process_without_a_group_saves_and_loads(cluster_of: ClusterOf) -> None:
    """`no_dist=True` on one process saves one copy, and any world loads it."""
    cluster = cluster_of(2)
    saving = call(saving_steps.save_without_group, kinds=["plain", "unwrapped"], checkpoint_id="step-1")
    loading = call(state.load, kinds=["plain", "unwrapped"], checkpoint_id="latest")
    saved = cluster.launch([saving, loading], nodes=[0], launcher="single")
    assert saved.of(loading).digests() == saved.of(saving)
    plain = {name: value for name, value in saved.of(saving)[0].items() if name.startswith("plain/")}
    loaded = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="step-1"), nodes=[1, 0])
    assert loaded.digests() == [plain, plain]


@pytest.mark.long
def test_one_rank_loads_alone_while_the_others_are_busy(cluster_of: ClusterOf) -> None:
    """With `no_dist=True` one rank of a running world loads without waiting for the others."""
    cluster = cluster_of(2)
    save = call(state.save, kinds=["plain"], checkpoint_id="step-1")
    by_rank_1 = call(saving_steps.load_alone, kinds=["plain"], checkpoint_id="step-1", ranks=[1])
    by_rank_0 = call(saving_steps.load_alone, kinds=["plain"], checkpoint_id="latest", ranks=[0])
    results = cluster.launch([save, by_rank_1, by_rank_0], nodes=[0, 1])
    saved = results.of(save).agreed()
    assert results.of(by_rank_1) == [None, saved]
    assert results.of(by_rank_0) == [saved, None]


def test_every_rank_agrees_on_the_latest(cluster_of: ClusterOf) -> None:
    """ "latest" is the checkpoint with the newest save time on every rank, whatever the rank's own store contains."""
    cluster = cluster_of(3)
    kinds = ["plain"]
    older, newer = (call(state.save, kinds=kinds, checkpoint_id=f"step-{step}", seed=step) for step in (9, 10))
    newest = cluster.launch([older, newer], nodes=[0, 1]).of(newer).agreed()
    load = call(state.load, kinds=kinds, checkpoint_id="latest")
    blank_first = cluster.run(load, nodes=[2, 0, 1])
    assert blank_first.digests() == [newest] * 3
    shutil.rmtree(cluster.nodes[0].disk / "step-10")
    cluster.nodes[0].kill_agent()
    one_is_behind = cluster.run(load, nodes=[0, 1, 2])
    assert one_is_behind.digests() == [newest] * 3
    assert {value["report"]["checkpoint_id"] for value in one_is_behind} == {"step-10"}


def test_a_missing_checkpoint_raises_not_found(cluster_of: ClusterOf) -> None:
    """A name that was never saved, and "latest" of empty stores, raise CheckpointNotFound within 20 s."""
    by_name, latest = (call(state.load_fails, kinds=["plain"], checkpoint_id=name) for name in ("step-1", "latest"))
    results = cluster_of(2).launch([by_name, latest], nodes=[0, 1])
    for failure in [*results.of(by_name), *results.of(latest)]:
        assert failure["types"] == ["CheckpointNotFound"]
        assert failure["seconds"] < 20
