"""Locks on files and directories. Each ends with `release` or with its process, even if that process has forked."""

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
"""Longest wait for a lock that another thread or process holds."""
LOCK_STOPPED_S = 2.0
"""Longest wait while the holder is a stopped process, which cannot release the lock before it is continued."""
_POLL_S = 0.005
_POLL_FIRST_S, _POLL_MAX_S = 0.001, 0.02


class Closable(Protocol):
    """An object with a descriptor, such as a socket."""

    def close(self) -> object:
        """Closes the descriptor. In a fork this must not affect the other processes that hold it."""


_not_in_forks: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_forks(held: Closable) -> None:
    """Each process forked from now on, such as a data loader's worker, closes its copy of `held` at once.

    An agent detects the end of a process by its lock or connection. A worker's copy would keep both open after that.
    Source: flock(2), "locks are associated with an open file description". Forks outside Python are not covered.
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
        """Owns `fd` from now on; it may be locked later."""
        self.fd = fd
        """-1: it was released, or this is a fork."""
        close_in_forks(self)

    @property
    def is_locked(self) -> bool:
        return self.fd >= 0

    def wait(self, path: Path, *, shared: bool = False, within_s: float | None = None) -> None:
        """Waits for the lock of the file at `path`, and takes it. On an error the descriptor is closed.

        Raises:
            StoreUnavailable: another process holds it for too long, or is stopped.
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
            # Most locks are released sooner: /proc is read only once the polls have slowed down.
            if pause_s < _POLL_MAX_S or not (pid := holder_of(path)) or not is_stopped(pid):
                moving_at = now
            if now - moving_at > LOCK_STOPPED_S or now - began > within_s:
                raise _held_for_too_long(path, now - began)

    def try_take(self, *, shared: bool = False) -> bool:
        """Takes the lock; False if another process holds it now. Raises OSError; ENOLCK: the mount has no locks."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            # NFS and others refuse with different error numbers: ENOLCK for all of them, which has its own hint.
            if exc.errno not in NOT_OFFERED:
                raise
            raise OSError(errno.ENOLCK, f"flock is refused ({exc.strerror})") from exc
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Ends the lock, even if a fork still has the descriptor. Does nothing in a fork, or a second time.

        An interrupt in here ends the lock, too; otherwise the next save of this process would wait for itself. An error
        of a network file system is ignored: the work under the lock is done.
        """
        try:
            if self.is_locked:
                with contextlib.suppress(OSError):
                    # Closing alone would not end it: a forked worker may hold the same open file.
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1  # first: a second close could hit another file's descriptor
        if fd >= 0:
            os.close(fd)


class FileLock(DescriptorLock):
    """A flock on a file held until `release`, or the end of the process."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(fd)
        self.path = path

    @classmethod
    def acquire(cls, path: Path, *, shared: bool = False) -> "FileLock | None":
        """The lock, or None if another process holds it now. Works on a file system that has become read-only.

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
                # An interrupt between open and flock must not leak the descriptor.
                not_taken.callback(lock.close)
                if not lock.try_take(shared=shared):
                    return None
                not_taken.pop_all()
        return lock

    @classmethod
    def take_within(cls, path: Path, timeout_s: float, *, shared: bool = False) -> "FileLock | None":
        """As `acquire`, but waits up to `timeout_s` for the holder to release the lock; None if it does not."""
        deadline = time.monotonic() + timeout_s
        while (lock := cls.acquire(path, shared=shared)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return lock

    @classmethod
    def is_taken(cls, path: Path, *, shared: bool = False) -> bool:
        """Whether `acquire` would return None now, because another process holds the lock. Raises as `acquire`."""
        lock = cls.acquire(path, shared=shared)
        if lock is not None:
            lock.release()
        return lock is None

    def is_in_place(self) -> bool:
        """Whether the locked file still has its name: False once its directory was removed, made again, or mounted over.

        Compares the device, too: on a snapshot or a freshly formatted disk the file may have the same inode number.
        """
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fd))
        except FileNotFoundError:
            return False


def holder_of(path: Path) -> int | None:
    """The process that took the flock of a file; None: no process did, or it is not visible, as in another container.

    Source: proc(5), /proc/locks. None also where a file's device differs from that of its locks, as on btrfs.
    """
    with contextlib.suppress(OSError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            # A pid below 1: a lock of an open file description, or of a process outside this pid namespace.
            if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                return int(fields[4])
    return None


def state_and_start(pid: int) -> tuple[str, str]:
    """Fields 3 and 22 of /proc/PID/stat: state and start time. Source: proc(5).

    Raises:
        OSError: no such process runs, or it cannot be seen.
    """
    # The name in field 2 may hold spaces, brackets and half a letter: the kernel cuts it after 15 bytes.
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
    name, intact = "another process" if pid is None else f"process {pid}", "Published checkpoints are unchanged."
    if pid is not None and is_stopped(pid):
        why, hint = f"{name} holds it and is stopped", f"`kill -CONT {pid}`, or kill it; then try again. {intact}"
    else:
        look = f"`fuser -v {path}` names it" if pid is None else f"`cat /proc/{pid}/wchan` shows what it waits for"
        why, hint = f"{name} has held it for {waited_s:.0f} s", f"{look}; end it, and try again. {intact}"
    return StoreUnavailable(str(path.parent), "lock", path.name, why, hint)


@contextlib.contextmanager
def exclusive(directory: Path, within_s: float | None = None) -> Iterator[None]:
    """Locks a directory for the block, so that one thread or process runs it at a time. A missing one is not locked.

    Two processes that rename the same files would undo each other's work.

    Raises:
        StoreUnavailable: another process holds the lock for too long, or is stopped.
    """
    if not is_directory(directory):
        yield
        return
    with DescriptorLock(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as lock:
        lock.wait(directory, within_s=within_s)
        yield
