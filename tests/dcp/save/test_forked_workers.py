"""Locks and submissions end with their owner, although a process that the owner forked, such as a data loader's worker,
lives on.
"""

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from replicated_ckpt.dcp.save.submission import Submission
from replicated_ckpt.stores.files.locks import FileLock, close_in_forks, exclusive
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for

SAVE = "0" * 32


@contextlib.contextmanager
def locked_start(path: Path) -> Iterator[None]:
    lock = FileLock.acquire(path / "start")
    assert lock is not None
    yield
    lock.release()


@contextlib.contextmanager
def locked_save(path: Path) -> Iterator[None]:
    lock = opened(path).lock_save(SAVE)
    yield
    lock.release()


def opened(path: Path) -> LocalStore:
    store = LocalStore(path)
    if not store.intent_path(SAVE).exists():
        store.begin(Intent(SAVE, "step-1", "s", overwrite=False))
    return store


def is_directory_free(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def is_agent_lock_free(path: Path) -> bool:
    lock = FileLock.acquire(path / "start")
    if lock is not None:
        lock.release()
    return lock is not None


LOCKS: dict[str, tuple[Callable[[Path], AbstractContextManager[None]], Callable[[Path], bool]]] = {
    "a directory": (exclusive, is_directory_free),
    "an agent's start": (locked_start, is_agent_lock_free),
    "an open save": (locked_save, lambda path: not opened(path).is_locked(SAVE)),
}


@contextlib.contextmanager
def worker() -> Iterator[int]:
    """A forked process that does nothing. It is killed at the end of the block."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("kind", LOCKS)
def test_a_forked_process_keeps_no_lock(tmp_path: Path, kind: str) -> None:
    """A lock that the parent has released is free, although a forked process still lives."""
    hold, is_free = LOCKS[kind]
    with contextlib.ExitStack() as ends:
        with hold(tmp_path):
            assert not is_free(tmp_path)
            ends.enter_context(worker())
        assert is_free(tmp_path)


@pytest.mark.parametrize("kind", LOCKS)
def test_a_killed_process_leaves_no_lock_to_its_workers(tmp_path: Path, kind: str) -> None:
    """The owner of a lock is killed: the lock becomes free, although its forked worker lives on."""
    hold, is_free = LOCKS[kind]
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        with hold(tmp_path), worker() as its_worker:
            os.write(writing, its_worker.to_bytes(4, "little"))
            signal.pause()
        os._exit(1)
    its_worker = int.from_bytes(os.read(reading, 4), "little")
    try:
        assert not is_free(tmp_path)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        wait_for(lambda: is_free(tmp_path), 30, "the worker has closed its copy of the lock")
    finally:
        os.kill(its_worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_a_forked_process_keeps_no_submission_open() -> None:
    """The agent's connection ends when the rank closes its submission, not when a forked process closes its copy."""
    rank, agent = socket.socketpair()
    close_in_forks(rank)
    submitted = Submission(rank)
    agent.settimeout(0.5)
    with worker():
        child = os.fork()
        if child == 0:
            submitted.close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(TimeoutError):
            agent.recv(1)
        submitted.close()
        assert agent.recv(1) == b""
    agent.close()


def test_a_forked_process_cannot_release_its_parents_lock(tmp_path: Path) -> None:
    """A forked process releases its parent's lock: the lock stays held, and another descriptor with that number stays
    open.
    """
    lock = opened(tmp_path).lock_save(SAVE)
    number = lock.fd
    child = os.fork()
    if child == 0:
        os.dup2(0, number)
        lock.release()
        os.fstat(number)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert opened(tmp_path).is_locked(SAVE)
    lock.release()
    assert not opened(tmp_path).is_locked(SAVE)


def test_a_fork_takes_locks_of_its_own(tmp_path: Path) -> None:
    """A forked process can take locks of its own, and does not hold its parent's."""
    store = opened(tmp_path)
    parents = store.lock_save(SAVE)
    child = os.fork()
    if child == 0:
        own = store.lock_save(SAVE)
        os._exit(0 if own.is_locked and not parents.is_locked else 1)
    assert os.waitpid(child, 0)[1] == 0
    parents.release()
