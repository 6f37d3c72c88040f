"""Locks on files and directories that end when their process ends them, whatever it has forked meanwhile."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.stores.files.existence import is_directory


def release_lock(fd: int, owner_pid: int) -> None:
    """Ends the flock on `fd` and closes it; in another process than its owner's, a forked one, it is closed alone.

    A data loader's worker that is forked while a lock is held has its descriptor, too: closing the owner's would leave the
    lock with the worker for as long as that lives. Source: flock(2), "locks are associated with an open file description".
    """
    if os.getpid() == owner_pid:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """One thread or process at a time is in the block; none is kept out while there is no such directory.

    Two that give the same names to the same directories would undo each other's work.
    """
    with contextlib.ExitStack() as held:
        if is_directory(directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(release_lock, fd, os.getpid())
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
