"""Whether something lies under a path. What the system refuses to say is an error, never "no", on every Python.

From Python 3.14 on `Path.exists`, `is_dir`, `is_file` and `is_symlink` answer False for any error, as `os.path.exists`
always has. A store that may not be looked into, or whose disk fails, would be taken for one that was never made.
"""

import errno
import os
import stat
from pathlib import Path

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_there(path: str | Path) -> bool:
    """Whether a file or directory lies there; a link that leads nowhere is none. Raises: OSError"""
    return _look(path) is not None


def is_name_taken(path: str | Path) -> bool:
    """Whether anything has this name, a link that leads nowhere, too. Raises: OSError"""
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
    """What has a name in the directory that begins so; nothing where there is none. Raises: OSError

    For names of one save: `Path.glob` compiles each pattern, and keeps hundreds.
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
    except ValueError:  # no file has a NUL in its name
        return None


def leads_out(root: Path, checkpoint_id: str) -> bool:
    """Whether a symbolic link on the way to a checkpoint leads out of the root, or nowhere.

    Nothing outside a root is read or written for another user, whatever symbolic links lie inside it.
    """
    if _is_straight(root, checkpoint_id):  # as nearly all are: the rest costs ten times as much
        return False
    inside, real = os.path.realpath(root), os.path.realpath(root / checkpoint_id)
    if os.path.commonpath((inside, real)) != inside:
        return True
    at, end = Path(real), Path(inside)
    while at != end:
        if is_link(at):  # what links lead around in a circle is left as it is
            return True
        at = at.parent
    return False


def _is_straight(root: Path, checkpoint_id: str) -> bool:
    """Whether each part of a checkpoint's name is seen to be no link, or nothing that is there."""
    at = str(root)
    for part in checkpoint_id.split("/"):
        at = f"{at}/{part}"
        if part in ("", ".", "..") or is_link(at):
            return False
    return True
