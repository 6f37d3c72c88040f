"""Locks on files and directories that end when their process ends them, or itself, whatever it has forked meanwhile."""

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.files.existence import is_directory

LOCK_TIMEOUT_S = 120.0
"""So long a lock is waited for that another thread or process holds."""
LOCK_STOPPED_S = 2.0
"""And no longer than this, where that process is seen to be stopped all the while."""
_POLL_FIRST_S, _POLL_MAX_S = 0.001, 0.02


class Closable(Protocol):
    """What has a descriptor. A socket does."""

    def close(self) -> object:
        """Gives the descriptor back. In a fork this must say nothing to who else has it."""


_not_in_forks: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_forks(held: Closable) -> None:
    """A process that is forked from now on, as a data loader's worker, closes what it has of this at once.

    Else an agent, which learns by a lock or a connection that a process has ended, would learn it only when the worker has.
    Source: flock(2), "locks are associated with an open file description". What forks without Python is not seen.
    """
    _not_in_forks.add(held)


def _close_all() -> None:
    for held in list(_not_in_forks):
        held.close()
    _not_in_forks.clear()


os.register_at_fork(after_in_child=_close_all)


class HeldLock:
    """A descriptor with a flock of this process alone, until `release` or the process's end."""

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, which may be locked later."""
        self._fd = fd
        close_in_forks(self)

    @property
    def fd(self) -> int:
        """-1: it was released, or this is a fork."""
        return self._fd

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def release(self) -> None:
        """Ends the lock, also where a fork has the descriptor still. Nothing, where this is a fork, or it was released."""
        if self.is_held:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Closes the descriptor of this process."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def holder_of(path: Path) -> int | None:
    """The process that took the flock of a file; None: none has, or this process may not see it, as in another container.

    Source: proc(5), /proc/locks. On a file system whose files tell another device than its locks do, none is found.
    """
    with contextlib.suppress(OSError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                return int(fields[4])
    return None


def is_stopped(pid: int) -> bool:
    """Whether a process is seen to be stopped, by a signal or a debugger. Source: proc(5), /proc/PID/stat."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")


def lock_within(fd: int, kind: int, path: Path) -> HeldLock:
    """The flock `kind` of the file behind `fd`, which is at `path`, once no other process holds one against it.

    Takes over `fd`, also where it raises.

    Raises:
        StoreUnavailable: another holds it for too long, or is stopped.
    """
    lock = HeldLock(fd)
    try:
        _await(fd, kind, path)
    except BaseException:
        lock.release()
        raise
    return lock


def _await(fd: int, kind: int, path: Path) -> None:
    began = moving_at = time.monotonic()
    pause_s = _POLL_FIRST_S
    while not _is_locked(fd, kind):
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _POLL_MAX_S)
        now = time.monotonic()
        if pause_s < _POLL_MAX_S or not (pid := holder_of(path)) or not is_stopped(pid):
            moving_at = now
        if now - moving_at > LOCK_STOPPED_S or now - began > LOCK_TIMEOUT_S:
            raise _held_for_too_long(path, now - began)


def _is_locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held_for_too_long(path: Path, waited_s: float) -> StoreUnavailable:
    pid = holder_of(path)
    name, intact = "another process" if pid is None else f"process {pid}", "What is published stays as it is."
    if pid is not None and is_stopped(pid):
        why, hint = f"{name} holds it and is stopped", f"`kill -CONT {pid}`, or kill it; then try again. {intact}"
    else:
        look = f"`fuser -v {path}` names it" if pid is None else f"`cat /proc/{pid}/wchan` says what it waits for"
        why, hint = f"{name} has held it for {waited_s:.0f} s", f"{look}; end it, and try again. {intact}"
    return StoreUnavailable(str(path.parent), "lock", path.name, why, hint)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """One thread or process at a time is in the block; none is kept out while there is no such directory.

    Two that give the same names to the same directories would undo each other's work.

    Raises:
        StoreUnavailable: another is in it for too long, or is stopped in it.
    """
    with contextlib.ExitStack() as held:
        if is_directory(directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(lock_within(fd, fcntl.LOCK_EX, directory).release)
        yield
