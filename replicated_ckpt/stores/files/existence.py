"""Whether a path exists, and whether it is a plain file. An error of the system is raised, and never means "no".

From Python 3.14 on `Path.exists`, `is_dir`, `is_file` and `is_symlink` return False for any error, as `os.path.exists`
always has. A store without permission, or on a failing disk, would then count as one that was never made.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path

from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_there(path: str | Path) -> bool:
    """Whether a file or directory lies there. A dangling link counts as nothing. Raises: OSError"""
    return _look(path) is not None


def is_name_taken(path: str | Path) -> bool:
    """Whether anything has this name, including a dangling link. Raises: OSError"""
    return _look(path, follow=False) is not None


def is_directory(path: str | Path) -> bool:
    """Whether a directory lies there, or a link to one. Raises: OSError"""
    found = _look(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_plain_file(path: str | Path) -> bool:
    """Whether a file lies there, or a link to one. Raises: OSError"""
    found = _look(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_link(path: str | Path) -> bool:
    """Whether a symbolic link lies there. Raises: OSError"""
    found = _look(path, follow=False)
    return found is not None and stat.S_ISLNK(found.st_mode)


def list_prefixed(directory: Path, prefix: str) -> list[Path]:
    """Paths in a directory whose names begin with `prefix`; empty if there is no such directory. Raises: OSError

    For names of one save: `Path.glob` would compile and cache a pattern for each save.
    """
    try:
        return [directory / name for name in os.listdir(directory) if name.startswith(prefix)]  # noqa: PTH208 - names alone
    except OSError as exc:
        if exc.errno in _NOTHING_THERE:
            return []
        raise


def _look(path: str | Path, *, follow: bool = True) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - for strings as well as for paths
    except OSError as exc:
        if exc.errno in _NOTHING_THERE:
            return None
        raise
    except ValueError:  # a NUL in a name from a peer or a pickle: no file has one
        return None


def leads_out(root: Path, checkpoint_id: str) -> bool:
    """Whether a symbolic link on the way to a checkpoint leads out of the root, or nowhere.

    Without this check, a link could make an agent read or write outside its root for another user.
    """
    if _is_straight(root, checkpoint_id):  # the usual case: the check below costs ten times as much
        return False
    inside, real = os.path.realpath(root), os.path.realpath(root / checkpoint_id)
    if os.path.commonpath((inside, real)) != inside:
        return True
    at, end = Path(real), Path(inside)
    while at != end:
        if is_link(at):  # `realpath` returns a link only where links form a circle
            return True
        at = at.parent
    return False


def _is_straight(root: Path, checkpoint_id: str) -> bool:
    """Whether no part of a checkpoint's path is empty, "." or "..", or a link. A part may be missing."""
    at = str(root)
    for part in checkpoint_id.split("/"):
        at = f"{at}/{part}"
        if part in ("", ".", "..") or is_link(at):
            return False
    return True


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
    """As `contextlib.closing`, for a file descriptor."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_plain_file(path: str | Path, flags: int = 0) -> FileIO:
    """As `open_plain`, but returns a file object."""
    return FileIO(open_plain(path, flags), "rb")


def read_plain(path: str | Path, size_max: int = MANIFEST_BYTES_MAX + 1, flags: int = 0) -> bytes:
    """The bytes of a file, at most `size_max`. The default exceeds the limit by one byte, so that callers detect excess."""
    with BufferedReader(open_plain_file(path, flags)) as file:
        return file.read(min(size_max, os.fstat(file.fileno()).st_size + 1))  # `read` allocates the size it is given
