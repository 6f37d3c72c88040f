"""Detecting the end of other ranks' processes, with real processes."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.c10d import blackboard, waiting
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.waiting import Presence, Process, announce, describe_ended
from replicated_ckpt.dcp.c10d.world import _find_lost
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.locks import is_stopped
from tests.agent.agents import wait_for
from tests.gloo import end_group
from tests.harness.processes import stop_process

RANKS = 3
_PR_SET_NAME = 15


def presence(path: Path, rank: int) -> Presence:
    found = Presence(dist.FileStore(str(path), RANKS), rank)
    found.announce()
    return found


@contextmanager
def announced_child(path: Path, rank: int, name: bytes = b"rank") -> Iterator[int]:
    """A process of this name that has announced its rank. It is killed, and only then waited for, at the end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
            presence(path, rank)
            os.write(writing, b"!")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"!"
        yield pid
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_killed_process_is_lost_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    """A killed process is found before anybody waits for it, and ranks on other hosts learn of it. A stopped process is
    not reported as lost.
    """
    elsewhere = Presence(dist.FileStore(str(tmp_path / "store"), RANKS), 2)
    here = presence(tmp_path / "store", 0)
    with announced_child(tmp_path / "store", 1) as pid:
        assert here.find_lost() == {}
        stop_process(pid)
        assert here.find_lost() == {}
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not here.find_lost() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(here.find_lost()) == {1}
        assert set(elsewhere.find_lost()) == {1}


def test_lost_ranks_are_listed_in_the_order_of_detection(tmp_path: Path) -> None:
    """Lost ranks are listed in the order of their detection, as the first one may have caused the others' end."""
    here = presence(tmp_path / "store", 0)
    for rank in (2, 1):
        with announced_child(tmp_path / "store", rank) as pid:
            os.kill(pid, signal.SIGKILL)
            wait_for(partial(is_missed, here, rank), 5.0, "its end")
    lost = _find_lost(here, range(RANKS))
    assert str(describe_ended(lost)).startswith("The process of rank 2 has ended, and by now that of rank 1. Hint: ")
    assert "Read the log of rank 2." in describe_ended(lost).hint


def is_missed(here: Presence, rank: int) -> bool:
    return rank in here.find_lost()


def test_the_error_names_what_the_first_check_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names only the ranks that the first check found, not those that ended as a consequence."""
    monkeypatch.setattr(waiting, "LOOK_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(blackboard, "LINGER_S", 1.0)
    looks = iter(([2], [2, 3]))
    board = Blackboard(dist.HashStore(), 0, 4, find_lost=lambda: next(looks, [2, 3]))
    board.post("load", {})
    _, problem = board.collect("load", 30.0)
    assert str(problem).startswith("The process of rank 2 has ended. Hint:")
    assert next(looks, None) is None


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """A rank that does not post because it is stopped is named with its process, and the hint is to continue it."""
    here = presence(tmp_path / "store", 0)
    board = Blackboard(dist.HashStore(), 0, 2, find_stopped=here.find_stopped)
    board.post("load", {})
    with announced_child(tmp_path / "store", 1) as pid:
        here.find_lost()
        assert str(board.collect("load", 0.1)[1]).startswith("After 0 s ranks [1] had not joined this load. Hint: ")
        stop_process(pid)
        _, problem = board.collect("load", 0.1)
        os.kill(pid, signal.SIGCONT)
    assert f"Rank 1 is stopped, as process {pid}." in str(problem)
    assert f"`kill -CONT {pid}`" in str(problem)


def test_a_process_may_have_any_name(tmp_path: Path) -> None:
    """A process name may be any bytes. The kernel cuts it after 15 bytes, even within a character."""
    here = presence(tmp_path / "store", 0)
    with announced_child(tmp_path / "store", 1, "обучение".encode()) as pid:
        assert b"\xd0)" in Path(f"/proc/{pid}/stat").read_bytes()
        assert here.find_lost() == {}
        assert not is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert is_stopped(pid)


def test_another_process_with_the_same_pid_is_told_apart() -> None:
    """A process with the same pid but another start time counts as ended."""
    assert not Process(0, os.getpid(), "1").is_alive()


def test_a_lost_rank_is_recorded_once(tmp_path: Path) -> None:
    """A lost rank adds one key to the store, however often ranks check."""
    store = dist.FileStore(str(tmp_path / "store"), RANKS)
    here = presence(tmp_path / "store", 0)
    with announced_child(tmp_path / "store", 1) as pid:
        here.find_lost()
        keys = store.num_keys()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not here.find_lost() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(10):
            here.find_lost()
    assert store.num_keys() == keys + 1


def test_ranks_that_join_while_two_threads_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread checks the ranks of this host, another one learns of a new rank: neither fails."""
    here = presence(tmp_path / "store", 0)
    come: list[Presence] = []

    def look_meanwhile(process: Process) -> bool:
        if not come:
            come.append(presence(tmp_path / "store", 1))
            here.find_lost()
        return process.pid == os.getpid()

    monkeypatch.setattr(Process, "is_alive", look_meanwhile)
    assert here.find_lost() == {}


def look_in_a_fork(root: Path) -> int:
    """The exit status of a forked process that looks up checkpoints and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            ReplicatedWriter(root)
            assert ReplicatedReader(root, no_dist=True).latest() is None
            for meet in (ReplicatedReader(root).latest, lambda: CheckpointManager(root)):
                with pytest.raises(ConfigInvalid, match=r"was forked from a rank.*no_dist=True"):
                    meet()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_process_that_is_forked_from_a_rank_is_no_rank(tmp_path: Path) -> None:
    """A process forked from a rank, such as a data loader's worker, creates a reader and ends: the rank is not reported
    as lost.
    """
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        here = announce()
        assert here is not None
        assert look_in_a_fork(tmp_path / "node") == 0
        assert here.find_lost() == {}
    finally:
        end_group()
