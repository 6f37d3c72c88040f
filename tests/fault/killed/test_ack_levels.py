"""The promise of each acknowledgement level: every trainer is killed right after the acknowledgement, and the promise
still holds.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.config import Ack
from tests.fault.killed.test_submitted_saves import AGENTS_STAY_S, FILES, KINDS, seed
from tests.harness.cluster import Cluster, call
from tests.marks import mark_long
from tests.steps import async_saves, fault, state

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        yield cluster


def save_and_die(cluster: Cluster, ack: Ack) -> None:
    """All ranks are killed at the acknowledgement."""
    cluster.start_agents({0: {}, 1: {}}, idle_exit_s=AGENTS_STAY_S)
    step = call(async_saves.save_and_die, kinds=KINDS, ack=ack)
    attempt = cluster.attempt([step], nodes=[0, 1], grace_s=0.0)
    assert -signal.SIGKILL in attempt.codes, attempt


def seen(cluster: Cluster) -> set[str]:
    """What the ranks wrote down before they were killed: whether the checkpoint was published."""
    return {path.read_text() for path in cluster.base.glob("seen*")}


def lone_seed(cluster: Cluster, node: int) -> int:
    """The seed of the checkpoint that one node loads after the other node is lost with its disk."""
    cluster.nodes[1 - node].kill_agent()
    cluster.nodes[1 - node].lose()
    found = cluster.run(call(fault.seed_of, kinds=KINDS, checkpoint_id="step-1", seeds=[0]), nodes=[node])
    return int(found.agreed())


def test_peer(cluster: Cluster) -> None:
    """At the acknowledgement both nodes have published the checkpoint with all shards: rank 0's node may be lost with
    its disk.
    """
    save_and_die(cluster, "peer")
    assert seen(cluster) == {"True"}
    assert cluster.nodes[1].files("step-1") == FILES
    assert lone_seed(cluster, 1) == 0


@pytest.mark.parametrize("ack", mark_long(["local", "peer-memory"], keep=["local"]))
def test_local_and_peer_memory(cluster: Cluster, ack: Ack) -> None:
    """At the acknowledgement the checkpoint is committed on both nodes. Both disks together are enough to load it."""
    save_and_die(cluster, ack)
    assert seen(cluster) == {"True"}
    for rank, node in enumerate(cluster.nodes):
        assert "step-1" in node.checkpoints()
        assert node.files("step-1") >= (FILES if ack == "peer-memory" else {".metadata", f"__{rank}_0.distcp"})
    cluster.stop_agents()
    assert seed(cluster) == 0


def test_a_save_that_falls_behind_is_queued(cluster: Cluster) -> None:
    """The next save is staged at once, and is opened when the agents have published the previous one. All of them load,
    each with its own values.
    """
    slow = {failpoints.ENV: "agent.writing=sleep:6"}
    cluster.start_agents({0: slow, 1: slow}, idle_exit_s=AGENTS_STAY_S)
    ids = ["step-1", "step-2", "step-3"]
    loads = [call(state.load, kinds=KINDS, checkpoint_id=name) for name in ids]
    save = call(async_saves.save_ahead, kinds=KINDS, checkpoint_ids=ids)
    results = cluster.launch([save, *loads], nodes=[0, 1])
    for told in results.of(save):
        assert told["seen"] == [True, True, True]
        assert told["there"] == [True, True, True]
        assert told["reported"] == ids
        assert told["copies"] == 2
    for index, load in enumerate(loads):
        assert results.of(load).digests() == [told["digests"][index] for told in results.of(save)]
