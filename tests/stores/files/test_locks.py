"""A process waits for the staging area's lock while the holder works, but not for ever for a stopped holder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.errors import StoreError, StoreUnavailable
from replicated_ckpt.stores.files import locks
from replicated_ckpt.stores.files.locks import DescriptorLock, FileLock, exclusive
from tests.harness.processes import open_below, stop_process

HOME = Path(__file__).resolve().parents[3]
HOLDER = """
import sys
from pathlib import Path
from replicated_ckpt.stores.files.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read(1)
"""


@contextmanager
def held_elsewhere(directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process holds the lock, until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.timeout(60)
def test_a_stopped_holder_is_an_error_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is stopped: waiting raises an error that names the process and the command to continue it. Once the
    holder ends, the lock is free.
    """
    monkeypatch.setattr(locks, "LOCK_STOPPED_S", 0.2)
    with held_elsewhere(tmp_path) as holder:
        stop_process(holder.pid)
        with pytest.raises(StoreUnavailable) as raised, exclusive(tmp_path):
            pass
        assert f"process {holder.pid} holds it and is stopped" in str(raised.value)
        assert f"`kill -CONT {holder.pid}`" in str(raised.value)
        holder.send_signal(signal.SIGCONT)
        holder.communicate(b"", timeout=10)
        with exclusive(tmp_path):
            pass


@pytest.mark.timeout(60)
def test_a_holder_that_works_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running holder is waited for up to `LOCK_TIMEOUT_S`. Then the error names its process."""
    monkeypatch.setattr(locks, "LOCK_STOPPED_S", 0.05)
    with held_elsewhere(tmp_path) as holder:
        ending = threading.Timer(0.5, holder.kill)
        ending.start()
        began = time.monotonic()
        with exclusive(tmp_path):
            assert time.monotonic() - began > 0.3
        ending.join()
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_S", 0.3)
    with held_elsewhere(tmp_path) as holder:
        with pytest.raises(StoreUnavailable) as raised, exclusive(tmp_path):
            pass
        assert f"process {holder.pid} has held it" in str(raised.value)


@pytest.mark.timeout(60)
def test_a_lock_that_was_not_taken_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time-out, the waiting process has no open descriptor and no lock."""
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_S", 0.1)
    with held_elsewhere(tmp_path):
        with pytest.raises(StoreUnavailable), exclusive(tmp_path):
            pass
        assert open_below(tmp_path) == []
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EPERM, errno.EBADF, errno.EINVAL])
def test_a_file_system_without_locks_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """flock fails, as on NFS without lockd: the hint suggests a root with locks, not other permissions."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=f"flock is refused .{os.strerror(number)}") as raised:
        FileLock.acquire(tmp_path / "lock")
    assert "pass a root on one with locks" in raised.value.hint
    assert open_below(tmp_path) == []


def test_a_release_that_fails_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlocking fails, as on a network file system: closing the descriptor still releases the lock, and no error is
    raised.
    """
    held = FileLock.take_within(tmp_path / "lock", 0.0)
    assert held is not None
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        held.release()
    assert not FileLock.is_taken(tmp_path / "lock")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting another disk needs root")
def test_a_lock_is_not_taken_for_one_on_another_disk(tmp_path: Path) -> None:
    """Another disk is mounted over the lock's directory: a lock file with the same inode number there is not mistaken
    for this lock.
    """
    mount, path = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], tmp_path / "lock"
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        lock = FileLock.acquire(path)
        assert lock is not None
        assert lock.is_in_place()
        number = path.stat().st_ino
        subprocess.run(mount, check=True)
        path.touch()
        assert path.stat().st_ino == number
        assert not lock.is_in_place()
        lock.release()
    finally:
        while tmp_path.is_mount():
            subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_an_interrupt_before_the_release_ends_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a KeyboardInterrupt before the unlock, the lock is free for this process's next save."""
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), exclusive(tmp_path):
        monkeypatch.setattr(fcntl, "flock", interrupted)
    monkeypatch.undo()
    assert interrupted.called
    lock = DescriptorLock(os.open(tmp_path, os.O_RDONLY))
    assert lock.try_take()
    lock.release()
