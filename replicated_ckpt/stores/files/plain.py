"""Opening files that others may have replaced: a pipe or a device in a file's place is refused, without waiting."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path

from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX


def open_plain(path: str | Path, flags: int = 0, *, dir_fd: int | None = None) -> int:
    """File descriptor for reading a file; the caller closes it. Links are followed unless `flags` say otherwise.

    Raises:
        FileNotFoundError: nothing lies there, or a pipe or a device. IsADirectoryError, OSError
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=dir_fd)
    except ValueError as exc:  # a NUL in its name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from exc
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise FileNotFoundError(errno.ENOENT, "No plain file lies there", str(path))
    except OSError:  # fstat itself fails once an NFS server has lost the file
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """As `contextlib.closing`, of a file descriptor."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_plain_file(path: str | Path, flags: int = 0) -> FileIO:
    """As `open_plain`, as a file to read."""
    return FileIO(open_plain(path, flags), "rb")


def read_plain(path: str | Path, size_max: int = MANIFEST_BYTES_MAX + 1, flags: int = 0) -> bytes:
    """The bytes of a file, at most `size_max`. The default exceeds the limit by one byte, so that callers detect excess."""
    with BufferedReader(open_plain_file(path, flags)) as file:
        return file.read(min(size_max, os.fstat(file.fileno()).st_size + 1))  # `read` allocates the size it is given
