"""The hand-over of asynchronous saves: the agent reads the ranks' memory, and nothing that dies loses what was promised."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.agent.saves.hand_overs import HandedShard, HandOvers
from replicated_ckpt.agent.saves.shard_copies import WantedCopies
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.errors import ObjectCorrupt, SaveAborted
from replicated_ckpt.stores.local.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from tests.multiprocess.cluster import Cluster, call

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
KINDS = ["plain", "own"]
SAVE = "a" * 32
SHARD = str(ShardName(0, 0))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with one open save."""
    store = LocalStore(tmp_path / "root")
    store.node_id()
    store.begin(Intent(SAVE, "step-1", "session", overwrite=False))
    return store


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        yield cluster


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def handed(store: LocalStore, *pieces: tuple[int, int, int]) -> HandedShard:
    return HandedShard(WantedCopies(SAVE, SHARD, store.node_id()), pieces)


def test_a_shard_is_what_its_pieces_say(store: LocalStore) -> None:
    """Pieces of two descriptors, in their order; and both are closed afterwards."""
    staged, between = memory(b"0123456789" * 100_000), memory(b"abc")
    written = HandOvers(store).take(handed(store, (1, 0, 2), (0, 5, 900_000), (1, 2, 1)), [staged, between]).result(30)
    found = store.path_of_staged(SAVE, SHARD).read_bytes()
    assert found[:900_003] == b"ab" + (b"5678901234" * 90_000) + b"c"
    assert len(found) == written.size_bytes
    assert written.holders == (store.node_id(),)
    for fd in (staged, between):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_memory_that_is_cut_short_fails_the_shard_alone(store: LocalStore) -> None:
    """A rank that truncates its segment gets an error; the agent lives and takes the shard again."""
    hand_overs, staged = HandOvers(store), memory(b"0" * 1000)
    os.ftruncate(staged, 10)
    with pytest.raises(ObjectCorrupt, match="shorter than the rank said"):
        hand_overs.take(handed(store, (0, 0, 1000)), [staged]).result(30)
    assert list(store.staging(SAVE).iterdir()) == []
    assert hand_overs.take(handed(store, (0, 0, 10)), [memory(b"0" * 10)]).result(30).size_bytes > 10


def test_a_shard_that_is_written_anew_is_not_named_by_the_first_writer(store: LocalStore) -> None:
    """An agent that hangs and goes on, while its rank writes by itself, touches nothing of what the rank writes."""
    path = store.path_of_staged(SAVE, SHARD)
    hung, rank = FileSink(path), FileSink(path)
    hung.write(memoryview(b"old"))
    rank.write(memoryview(b"new"))
    with pytest.raises(SaveAborted, match="anew by another process"):
        hung.finish_durably()
    rank.finish_durably()
    assert path.read_bytes() == b"new"


def test_an_asynchronous_save_is_a_synchronous_one_bit_for_bit(cluster: Cluster) -> None:
    """The same shards, byte for byte, though an agent has written the one and a rank the other."""
    saves = [
        call("state.save", kinds=KINDS, checkpoint_id="step-0", seed=0),
        call("async.save", kinds=KINDS, checkpoint_ids=["step-1"]),
    ]
    cluster.start_agents({0: {}, 1: {}})
    cluster.launch(saves, nodes=[0, 1])
    for node in cluster.nodes:
        for name in ("__0_0.distcp", "__1_0.distcp"):
            assert (node.disk / "step-0" / name).read_bytes() == (node.disk / "step-1" / name).read_bytes()


@pytest.mark.parametrize("point", ["agent.handed-over", "agent.writing"])
def test_an_agent_dies_with_a_shard_in_its_hands(cluster: Cluster, point: str) -> None:
    """Its ranks live: the save is completed, with both copies, and loads bit for bit."""
    cluster.start_agents({0: {}, 1: {failpoints.ENV: f"{point}=kill"}})
    calls = [
        call("async.save", kinds=KINDS, checkpoint_ids=["step-1"]),
        call("state.load", kinds=KINDS, checkpoint_id="step-1"),
    ]
    results = cluster.launch(calls, nodes=[0, 1])
    assert cluster.agent_code(1) == -signal.SIGKILL, "the shard was not handed over"
    assert results.digests(1) == [saved[0] for saved in results.of(0)]
    for node in cluster.nodes:
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= node.files("step-1")
