"""Renames that rename(2) does not offer: swapping two names, and renaming only to a free name."""

import ctypes
import errno
import os
from pathlib import Path

from replicated_ckpt.stores.files.existence import is_name_taken

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(first: Path, second: Path) -> bool:
    """Swaps two names atomically; False where kernel or file system cannot."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def rename_if_free(path: Path, target: Path) -> bool:
    """Renames `path` unless `target` is there: False, and nothing changed, if it is."""
    try:
        if _renameat2(path, target, _RENAME_NOREPLACE):
            return True
    except FileExistsError:
        return False
    # The fallback is not atomic: two processes may both see a free name.
    if is_name_taken(target):
        return False
    path.rename(target)
    return True


def _renameat2(first: Path, second: Path, flags: int) -> bool:
    """False where kernel or file system cannot. Source: Linux renameat2(2)."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), flags) == 0:
        return True
    code = ctypes.get_errno()
    # EPERM may be the file's own, of an immutable file: then a plain rename must not be tried.
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP) or (code == errno.EPERM and _is_filtered(flags)):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def _is_filtered(flags: int) -> bool:
    """Whether a container's seccomp filter refuses the call as such: an empty path is ENOENT to a kernel that gets it."""
    _libc.renameat2(_AT_FDCWD, b"", _AT_FDCWD, b"", flags)
    return ctypes.get_errno() == errno.EPERM
