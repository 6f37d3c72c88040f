"""Locks on files and directories that end when their process ends them, or itself, whatever it has forked meanwhile."""

import contextlib
import errno
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.files.durable import NOT_OFFERED, translate_errors
from replicated_ckpt.stores.files.existence import is_directory

LOCK_TIMEOUT_S = 120.0
"""So long a lock is waited for that another thread or process holds."""
LOCK_STOPPED_S = 2.0
"""And no longer than this, where that process is seen to be stopped all the while."""
_POLL_S = 0.005
_POLL_FIRST_S, _POLL_MAX_S = 0.001, 0.02


class Closable(Protocol):
    """What has a descriptor. A socket does."""

    def close(self) -> object:
        """Gives the descriptor back. In a fork this must have no effect on the other processes that hold it."""


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


class DescriptorLock:
    """A descriptor with a flock of this process alone, until `release` or the process's end."""

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, which may be locked later."""
        self.fd = fd
        """-1: it was released, or this is a fork."""
        close_in_forks(self)

    @property
    def is_locked(self) -> bool:
        return self.fd >= 0

    def wait(self, path: Path, *, shared: bool = False, within_s: float | None = None) -> None:
        """Takes the lock of the file at `path`, once no other process keeps it from that. Where this raises it is closed.

        Raises:
            StoreUnavailable: another holds it for too long, or is stopped.
        """
        try:
            self._await(path, shared=shared, within_s=LOCK_TIMEOUT_S if within_s is None else within_s)
        except BaseException:
            self.close()
            raise

    def _await(self, path: Path, *, shared: bool, within_s: float) -> None:
        began = moving_at = time.monotonic()
        pause_s = _POLL_FIRST_S
        while not self.try_take(shared=shared):
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)
            now = time.monotonic()
            if pause_s < _POLL_MAX_S or not (pid := holder_of(path)) or not is_stopped(pid):
                moving_at = now
            if now - moving_at > LOCK_STOPPED_S or now - began > within_s:
                raise _held_for_too_long(path, now - began)

    def try_take(self, *, shared: bool = False) -> bool:
        """Takes the lock, or returns False if another process holds it now. Raises OSError, ENOLCK where there are none."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno not in NOT_OFFERED:
                raise
            raise OSError(errno.ENOLCK, f"flock is refused ({exc.strerror})") from exc
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Ends the lock, also where a fork has the descriptor still. Nothing, where this is a fork, or it was released.

        An interrupt right here ends it, too: the next save of this process would wait for it in vain. So does an error, as
        of a network file system: what the lock was for is done by now.
        """
        try:
            if self.is_locked:
                with contextlib.suppress(OSError):
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class FileLock(DescriptorLock):
    """A flock on a file held until `release`, or the end of the process."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(fd)
        self.path = path

    @classmethod
    def acquire(cls, path: Path, *, shared: bool = False) -> "FileLock | None":
        """The lock, or None if another process holds it now. A disk that has become read-only can still be locked.

        Raises:
            StoreError: the file cannot be opened, made or locked.
        """
        with translate_errors(str(path.parent), "lock", path.name):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as exc:
                if exc.errno != errno.EROFS:
                    raise
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with contextlib.ExitStack() as not_taken:
                lock = cls(path, fd)
                not_taken.callback(lock.close)
                if not lock.try_take(shared=shared):
                    return None
                not_taken.pop_all()
        return lock

    @classmethod
    def take_within(cls, path: Path, timeout_s: float, *, shared: bool = False) -> "FileLock | None":
        """As `take`, once the process that holds the lock releases it; None: it has not done so in this time."""
        deadline = time.monotonic() + timeout_s
        while (lock := cls.acquire(path, shared=shared)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return lock

    @classmethod
    def is_taken(cls, path: Path, *, shared: bool = False) -> bool:
        """Whether another process holds the lock so that `take` would return None. Raises as that does."""
        lock = cls.acquire(path, shared=shared)
        if lock is not None:
            lock.release()
        return lock is None

    def is_in_place(self) -> bool:
        """Whether the locked file still has its name: False once its directory was removed, made again, or mounted over.

        On another disk, as a snapshot or one that was just formatted, the file may have the same number.
        """
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fd))
        except FileNotFoundError:
            return False


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


def state_and_start(pid: int) -> tuple[str, str]:
    """Fields 3 and 22 of /proc/PID/stat. Source: proc(5); the second field is a name, of any bytes, cut after the 15th.

    Raises:
        OSError: no such process runs, or it cannot be seen.
    """
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return fields[0], fields[19]


def is_stopped(pid: int) -> bool:
    """Whether a process is seen to be stopped, by a signal or a debugger."""
    try:
        return state_and_start(pid)[0] in ("T", "t")
    except OSError:
        return False


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
def exclusive(directory: Path, within_s: float | None = None) -> Iterator[None]:
    """One thread or process at a time is in the block; none is kept out while there is no such directory.

    Two that give the same names to the same directories would undo each other's work.

    Raises:
        StoreUnavailable: another is in it for too long, or is stopped in it.
    """
    if not is_directory(directory):
        yield
        return
    with DescriptorLock(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as lock:
        lock.wait(directory, within_s=within_s)
        yield
