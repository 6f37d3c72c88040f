"""Submission of asynchronous saves: the agent reads the ranks' memory, and no acknowledged save is lost when a process
dies.
"""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.agent.repair.reprotect import STALE_SAVE_GRACE_S
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.errors import ObjectCorrupt, SaveAborted
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import Submissions, SubmittedShard
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.tee import Buffers
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import wait_for
from tests.harness.cluster import Attempt, Cluster, call
from tests.harness.node import Node
from tests.marks import long, mark_long
from tests.steps import async_saves, fault, state

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
KINDS = ["plain", "own"]
SAVE = "a" * 32
SHARD = str(ShardName(0, 0))
FILES = {".metadata", ".manifest.json", "__0_0.distcp", "__1_0.distcp"}
SETTLED_WITHIN_S = 30.0
ROUND_WITHIN_S = STALE_SAVE_GRACE_S + 60.0
"""By then each agent has had a round of re-protection, which settles saves whose ranks died before they submitted."""
AGENTS_STAY_S = 600.0


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


def submitted(store: LocalStore, *pieces: tuple[int, int, int]) -> SubmittedShard:
    return SubmittedShard(WantedCopies(SAVE, SHARD, store.node_id()), pieces)


def test_a_shard_consists_of_its_pieces(store: LocalStore) -> None:
    """The shard consists of pieces of two descriptors, in their order. Both descriptors are closed afterwards."""
    staged, between = memory(b"0123456789" * 100_000), memory(b"abc")
    written = (
        Submissions(store)
        .take_shard(submitted(store, (1, 0, 2), (0, 5, 900_000), (1, 2, 1)), [staged, between])
        .result(30)
    )
    found = store.path_of_staged(SAVE, SHARD).read_bytes()
    assert found[:900_003] == b"ab" + (b"5678901234" * 90_000) + b"c"
    assert len(found) == written.size_bytes
    assert written.holders == (store.node_id(),)
    for fd in (staged, between):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("size", [10, 11], ids=["written", "cut short"])
def test_the_descriptor_is_closed_before_the_result_is_set(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The agent closes the descriptor before the result is set. A waiting caller may then count descriptors, or write
    to the segment again.
    """
    close = os.close

    def close_slowly(fd: int) -> None:
        time.sleep(0.3)
        close(fd)

    staged = memory(b"0" * 10)
    monkeypatch.setattr(os, "close", close_slowly)
    Submissions(store).take_shard(submitted(store, (0, 0, size)), [staged]).exception(30)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(staged)


def test_a_truncated_segment_fails_only_its_shard(store: LocalStore) -> None:
    """A rank truncates its memory segment: it gets an error, and the agent accepts the shard again."""
    submissions, staged = Submissions(store), memory(b"0" * 1000)
    os.ftruncate(staged, 10)
    with pytest.raises(ObjectCorrupt, match="shorter than the rank announced"):
        submissions.take_shard(submitted(store, (0, 0, 1000)), [staged]).result(30)
    assert list(store.staging(SAVE).iterdir()) == []
    assert submissions.take_shard(submitted(store, (0, 0, 10)), [memory(b"0" * 10)]).result(30).size_bytes > 10


def test_a_failed_shard_frees_its_buffers(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its last 64 failed shards the agent keeps the errors, but not the buffers."""
    buffers: list[weakref.ref[Buffers]] = []

    class Watched(Buffers):
        def __init__(self) -> None:
            super().__init__()
            buffers.append(weakref.ref(self))

    monkeypatch.setattr("replicated_ckpt.node.saves.submissions.Buffers", Watched)
    submissions = Submissions(store)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            failed = submissions.take_shard(submitted(store, (0, 0, 11)), [memory(b"0" * 10)])
            assert isinstance(failed.exception(30), ObjectCorrupt)
        wait_for(lambda: [ref() for ref in buffers] == [None] * 3, 30, "the release of all buffers")
    finally:
        gc.enable()


def test_a_shard_is_written_at_the_pace_of_copies(store: LocalStore) -> None:
    """The agent limits its rate while training goes on. When it stops, it writes the remaining shards at full speed."""
    stopping, submissions, size = threading.Event(), Submissions(store), 12 << 20
    submissions.pace = Pace(8 << 20, stopping)
    started = time.monotonic()
    submissions.take_shard(submitted(store, (0, 0, size)), [memory(bytes(size))]).result(30)
    assert time.monotonic() - started > 1
    submissions.pace = Pace(1, stopping)
    store.begin(Intent("f" * 32, "step-2", "session", overwrite=False))
    again = SubmittedShard(WantedCopies("f" * 32, SHARD, store.node_id()), [(0, 0, size)])
    future = submissions.take_shard(again, [memory(bytes(size))])
    stopping.set()
    assert future.result(30).size_bytes > size


def test_the_first_writer_does_not_publish_a_shard_that_is_written_again(store: LocalStore) -> None:
    """The agent hangs, its rank writes the shard itself, and the agent continues: the agent does not touch the rank's
    file.
    """
    path = store.path_of_staged(SAVE, SHARD)
    hung, rank = FileSink.create(path), FileSink.create(path)
    hung.write(memoryview(b"old"))
    rank.write(memoryview(b"new"))
    with pytest.raises(SaveAborted, match="another process writes it anew"):
        hung.finish_durably()
    rank.finish_durably()
    assert path.read_bytes() == b"new"


def test_an_asynchronous_save_equals_a_synchronous_one_bit_for_bit(cluster: Cluster) -> None:
    """Shards that an agent wrote equal the shards that a rank wrote, byte for byte."""
    saves = [
        call(state.save, kinds=KINDS, checkpoint_id="step-0", seed=0),
        call(async_saves.save, kinds=KINDS, checkpoint_ids=["step-1"]),
    ]
    cluster.start_agents({0: {}, 1: {}}, idle_exit_s=AGENTS_STAY_S)
    cluster.launch(saves, nodes=[0, 1])
    for node in cluster.nodes:
        for name in ("__0_0.distcp", "__1_0.distcp"):
            assert (node.disk / "step-0" / name).read_bytes() == (node.disk / "step-1" / name).read_bytes()


def test_the_trainer_writes_only_if_its_agent_cannot(cluster: Cluster) -> None:
    """The agent writes the staged state. A trainer that cannot reach its agent writes the state itself."""
    call_of_saves = call(async_saves.bytes_of_saves, mebibytes=64)
    for written in cluster.run(call_of_saves, nodes=[0, 1], timeout_s=280.0):
        assert written["agent"] < 1 << 20
        assert written["rank"] >= 64 << 20


def has_all(node: Node) -> bool:
    return "step-1" in node.checkpoints() and node.files("step-1") == FILES and not node.staging()


def await_all(cluster: Cluster, is_so: Callable[[Node], bool], within_s: float = SETTLED_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not all(map(is_so, cluster.nodes)):
        assert time.monotonic() < deadline, [(node.checkpoints(), node.staging()) for node in cluster.nodes]
        time.sleep(0.1)


def save(cluster: Cluster, **armed: str) -> Attempt:
    """An asynchronous save with these failpoints. If one rank is killed, all of them are."""
    often = {"REPLICATED_CKPT_AGENT_ROUND_EVERY_S": "1"}
    points = {node: {failpoints.ENV: armed.get(f"agent{node}", ""), **often} for node in (0, 1)}
    cluster.start_agents(points, idle_exit_s=AGENTS_STAY_S)
    for rank, node in enumerate(cluster.nodes):
        node.environment = {failpoints.ENV: armed.get(f"rank{rank}", "")}
    attempt = cluster.attempt(
        [call(async_saves.save, kinds=KINDS, checkpoint_ids=["step-1"])], nodes=[0, 1], grace_s=0.0
    )
    for node in cluster.nodes:
        node.environment = {}
    return attempt


def seed(cluster: Cluster) -> Any:
    """The seed of the checkpoint that a new job loads: 0 if the values are as saved."""
    found = call(fault.seed_of, kinds=KINDS, checkpoint_id="step-1", seeds=[0])
    litter = call(fault.litter, within_s=SETTLED_WITHIN_S)
    results = cluster.launch([found, litter], nodes=[0, 1])
    assert results.of(litter) == [[], []]
    return results.of(found).agreed()


@pytest.mark.parametrize("slow", mark_long(["rank0", "agent0", "agent1"], keep=["agent1"]))
def test_all_trainers_die_after_the_save_is_submitted(cluster: Cluster, slow: str) -> None:
    """All ranks are killed while the agents still have bytes to write: both nodes publish the save, and it loads."""
    armed = {"rank0": "coordinator.submitted=kill"}
    attempt = save(cluster, **{**({slow: "agent.writing=sleep:3"} if slow != "rank0" else {}), **armed})
    assert attempt.codes[0] == -signal.SIGKILL  # the other rank is killed as well, or ends with an error
    await_all(cluster, has_all)
    assert seed(cluster) == 0


def test_all_trainers_die_and_all_agents_get_sigterm(cluster: Cluster) -> None:
    """All agents get SIGTERM while they still have bytes to write and to send: when they have ended, the save is
    complete.
    """
    slow = "agent.writing=sleep:3"
    save(cluster, rank0="coordinator.submitted=kill", agent0=slow, agent1=slow)
    assert not any(node.checkpoints() for node in cluster.nodes), "the save was published before SIGTERM"
    cluster.stop_agents()
    assert all(map(has_all, cluster.nodes)), [(node.checkpoints(), node.staging()) for node in cluster.nodes]
    assert seed(cluster) == 0


@pytest.mark.parametrize(
    "armed",
    [
        long({"rank0": "rank.handing-over=kill"}),  # takes STALE_SAVE_GRACE_S, a minute
        long({"rank0": "rank.handing-over=kill", "rank1": "rank.handing-over=sleep:60"}),
        {"rank1": "rank.submitted=kill"},
        long({"rank0": "rank.submitted=kill"}),
        long({"rank0": "coordinator.metadata-staged=kill"}),
        {"rank0": "coordinator.metadata-staged=kill", "agent1": "agent.writing=sleep:3"},
    ],
    ids=str,
)
def test_all_trainers_die_before_the_save_is_submitted(cluster: Cluster, armed: dict[str, str]) -> None:
    """The save is removed from every node, without another save or load.

    If all agents had got their shards, this takes seconds. Otherwise re-protection removes the save later.
    """
    assert -signal.SIGKILL in save(cluster, **armed).codes
    await_all(cluster, lambda node: not node.staging() and not node.checkpoints(), ROUND_WITHIN_S)


@pytest.mark.parametrize(
    ("agent", "point"),
    [
        long(1, "agent.submitted"),
        (1, "agent.writing"),
        long(0, "agent.writing"),
        (0, "agent.finishing"),
        (0, "agent.decided"),
        long(0, "agent.finished"),
    ],
)
def test_an_agent_dies_with_a_submitted_save(cluster: Cluster, agent: int, point: str) -> None:
    """The ranks start the agent again, and submit their shards again. The save succeeds with both copies, bit for bit."""
    attempt = save(cluster, **{f"agent{agent}": f"{point}=kill"})
    assert cluster.agent_code(agent) == -signal.SIGKILL, f"{point} was not reached"
    assert attempt.codes == [0, 0], attempt
    await_all(cluster, has_all)
    assert seed(cluster) == 0


@pytest.mark.parametrize(("point", "is_decided"), [("agent.finishing", False), ("agent.decided", True)])
def test_trainers_and_an_agent_die(cluster: Cluster, point: str, is_decided: bool) -> None:
    """All ranks and the coordinator's agent die. A decided save is complete after the next load; an undecided one is
    complete or absent.
    """
    save(cluster, rank0="coordinator.submitted=kill", agent0=f"{point}=kill")
    assert cluster.agent_code(0) == -signal.SIGKILL, f"{point} was not reached"
    gone = [] if is_decided else [["CheckpointNotFound"], ["CheckpointNotCommitted"]]
    assert seed(cluster) in [0, *gone]
