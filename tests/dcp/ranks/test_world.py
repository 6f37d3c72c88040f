"""The world of a save or load, as one process sees it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.dcp.c10d import blackboard, waiting
from replicated_ckpt.dcp.c10d.blackboard import Blackboard, check_all_posted
from replicated_ckpt.dcp.c10d.group_pool import PooledGroup
from replicated_ckpt.dcp.c10d.picklable_error import pack_error, unpack_error
from replicated_ckpt.dcp.c10d.waiting import AnsweringStore, Presence, reaching_store
from replicated_ckpt.dcp.c10d.world import World, watch_group
from replicated_ckpt.errors import ConfigInvalid, RankFailed, RendezvousFailed
from tests.gloo import group_of_one
from tests.harness.processes import stop_process
from tests.stopwatch import Stopwatch

TIMEOUT_S = 60.0


def test_a_forked_process_is_a_session_of_its_own() -> None:
    """A forked process has its own session, so that no rank treats another's saves as its own."""
    world = World(0, 1, None)
    here = world.session
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, world.session.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        there = answer.read()
    os.waitpid(pid, 0)
    assert there.endswith("/alone")
    assert there != here == world.session


class Groups:
    """Fake of a job's groups."""

    def __init__(self) -> None:
        self.groups, self.in_use = ["a group"], {0}


def test_a_pooled_group_of_destroyed_groups_raises() -> None:
    """After the job's groups were destroyed, a pooled group raises ConfigInvalid. Closing it is no error."""
    pool: Any = Groups()
    pooled = PooledGroup(pool, 0)
    assert pooled.group == "a group"
    del pool
    with pytest.raises(ConfigInvalid, match="have been destroyed") as raised:
        _ = pooled.group
    assert "destroy_process_group" in raised.value.hint
    pooled.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the waits to 0.1 s."""
    for module, name in (
        (waiting, "LOOK_AFTER_S"),
        (waiting, "LOOK_EVERY_S"),
        (waiting, "LINGER_S"),
        (blackboard, "LINGER_S"),
    ):
        monkeypatch.setattr(module, name, 0.1)


def boards(store: Any, size: int, find_lost: Callable[[], Sequence[int]] = tuple) -> list[Blackboard]:
    return [Blackboard(store, rank, size, find_lost=find_lost) for rank in range(size)]


@pytest.mark.parametrize("release", ["0 0.0.1", "2 9.0.0", None])
def test_ranks_of_another_protocol_are_refused(release: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of another protocol version fails the call on all ranks, before its post is interpreted."""
    here = boards(dist.HashStore(), 2)
    nonces = [here[0].post("load", {})]
    monkeypatch.setattr(blackboard, "RELEASE", release)
    nonces.append(here[1].post("load", {}))
    posts, problem = here[0].collect("load", TIMEOUT_S)
    what = "an unknown release" if release is None else release.split()[1]
    with pytest.raises(ConfigInvalid, match=rf"Rank 1 runs replicated_ckpt {what} \(.*, but rank 0 runs ") as caught:
        check_all_posted(posts, problem)
    assert "and start the job again" in caught.value.hint
    here[0].decide("load", posts, {"error": pack_error(caught.value)})
    for board, nonce in zip(here, nonces, strict=True):
        assert str(unpack_error(board.decision("load", nonce, TIMEOUT_S)["error"])) == str(caught.value)


@pytest.mark.usefixtures("quick")
def test_a_failure_is_reported_without_waiting_for_a_late_rank(stopwatch: Stopwatch) -> None:
    """A rank's error reaches the others without waiting for a late rank. The late rank gets it later, and the next call
    succeeds.
    """
    first, second, late = boards(dist.HashStore(), 3)
    nonces = [first.post("load", {}), second.post("load", {"error": "full disk"})]
    posts, problem = first.collect("load", 30.0)
    assert [post is None for post in posts] == [False, False, True]
    assert isinstance(problem, RendezvousFailed)
    first.decide("load", posts, {"error": "full disk"})
    assert second.decision("load", nonces[1], 5.0)["error"] == "full disk"
    began = stopwatch.now()
    stale = late.post("load", {})
    assert late.decision("load", stale, 30.0)["error"] == "full disk"
    assert stopwatch.now() - began < 5
    late.withdraw("load")

    answered = nonces
    nonces = [board.post("load", {}) for board in (first, second, late)]
    posts, problem = first.collect("load", 5.0, [*answered, None])
    assert problem is None
    first.decide("load", posts, {"survey": 1})
    assert late.decision("load", nonces[2], 5.0, before=stale) == {"survey": 1}


@pytest.mark.usefixtures("quick")
def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    """The coordinator does not wait for a rank that has ended, nor do ranks wait for a coordinator that has ended."""
    store = dist.HashStore()
    first, second, _ = boards(store, 3, lambda: [2])
    first.post("load", {})
    second.post("load", {})
    _, problem = first.collect("load", 30.0)
    assert isinstance(problem, RankFailed)
    assert "rank 2" in problem.message
    _, other = boards(store, 2, lambda: [0])
    with pytest.raises(RankFailed, match="rank 0"):
        other.decision("load", other.post("load", {}), 30.0)


@pytest.mark.usefixtures("quick")
def test_a_slow_rank_is_waited_for() -> None:
    first, second = boards(dist.HashStore(), 2)
    first.post("load", {})
    timer = threading.Timer(1.0, second.post, ["load", {}])
    timer.start()
    posts, problem = first.collect("load", 30.0)
    timer.join()
    assert problem is None
    assert None not in posts


def test_a_store_that_is_gone_is_named() -> None:
    """The process that served the c10d store has ended: a post raises RendezvousFailed, which names the store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    board = Blackboard(client, 1, 2)
    board.post("load", {})
    del server
    with pytest.raises(RendezvousFailed, match="c10d store"):
        board.post("load", {})


@pytest.mark.parametrize("group", ["gloo", dist.GroupMember.NON_GROUP_MEMBER], ids=["a name", "of other ranks"])
def test_a_process_group_without_this_rank_is_refused(tmp_path: Path, group: Any) -> None:
    """`process_group` is a name, or a group without this rank: the save raises ConfigInvalid and writes nothing."""
    writer = ReplicatedWriter(tmp_path, copies=1, process_group=group)
    with group_of_one(), pytest.raises(CheckpointException, match="not in that group") as raised:
        dcp.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer)
    assert isinstance(raised.value.failures[0][0], ConfigInvalid)
    assert not (tmp_path / "step-1").exists()


def test_collectives_do_not_use_the_default_device() -> None:
    """Collectives use CPU tensors, as gloo needs, whatever the default device."""
    with group_of_one(), torch.device("meta"):
        watched, most = watch_group(dist.group.WORLD), torch.tensor([3], device="cpu")
        watched.reduce_to_max(most)
        assert watched.gather_object("plan") == watched.all_gather_object("plan") == ["plan"]
        assert watched.scatter_object(["plan"]) == watched.broadcast_object("plan") == "plan"
    assert most.tolist() == [3]


@contextmanager
def served() -> Iterator[tuple[int, int]]:
    """A forked process that serves a c10d store: its pid and port."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as told:
            yield pid, int(told.read(9))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_calls_to_a_stopped_store_fail_after_its_time_out(stopwatch: Stopwatch) -> None:
    """The process that serves the store is stopped: a call fails after its time-out, and later calls at once. After it
    continues, the store is used again.
    """
    with served() as (pid, port):
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        board, presence = Blackboard(AnsweringStore("job", store), 1, 2), Presence(store, 1)
        board.post("load", {"first": 1})
        store.set_timeout(timedelta(seconds=1))
        stop_process(pid)
        began = stopwatch.now()
        with pytest.raises(RendezvousFailed, match="does not answer: no answer within its time-out of 1 s"):
            board.post("load", {"second": 2})
        for _ in range(10):
            with pytest.raises(RendezvousFailed), reaching_store():
                presence.find_lost()
        assert stopwatch.now() - began < 5
        os.kill(pid, signal.SIGCONT)
        store.set_timeout(timedelta(seconds=30))
        assert waiting._unanswered[store][0].exception(30) is None  # the aborted call has its answer
        board.post("load", {"third": 3})
        assert (board.read_post("load", 1) or {})["third"] == 3


class BlockedStore:
    """Answers once `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def check(self, keys: list[str]) -> bool:
        del keys
        return self.answers.wait(TIMEOUT_S)


def abort_a_call(job: "dist.Store") -> tuple[AnsweringStore, BlockedStore]:
    job.set_timeout(timedelta(seconds=0))
    store, held = AnsweringStore("job", job), BlockedStore()
    store._store = cast(Any, held)
    with pytest.raises(dist.DistStoreError):
        store.check(["key"])
    job.set_timeout(timedelta(seconds=TIMEOUT_S))
    return store, held


def test_a_late_answer_reaches_all_waiting_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted call's answer arrives late: all threads that wait for the store continue."""
    store, held = abort_a_call(dist.HashStore())
    now, asked = time.monotonic() - TIMEOUT_S, threading.Semaphore(0)

    def tell_time() -> float:
        asked.release()
        return now

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=tell_time))
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(store.check, ["key"]) for _ in range(2)]
        assert all(asked.acquire(timeout=TIMEOUT_S) for _ in calls)
        held.answers.set()
        assert [call.result() for call in calls] == [True, True]
    assert store.check(["key"])


def test_an_unanswered_call_is_forgotten_with_its_store() -> None:
    """The record of an unanswered call is dropped with its store, as a later store may have the same address."""
    before = len(waiting._unanswered)
    job = dist.HashStore()
    store, held = abort_a_call(job)
    held.answers.set()
    del store, job
    assert len(waiting._unanswered) <= before
