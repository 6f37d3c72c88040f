"""Which name and which inode a call refers to: by path, by descriptor, or by a name in a directory's descriptor."""

import os
from pathlib import Path
from typing import Any

from tests.fault.power_loss.operations import ROOT, Disk, Entry


class Places:
    """Looks up names in `live`, the current disk below `base`, and tracks the inode of each descriptor."""

    def __init__(self, base: Path, live: Disk) -> None:
        self.base = base
        self.live = live
        self._inode_by_fd: dict[int, tuple[int, tuple[int, int]]] = {}

    def _opened(self, fd: int, inode: int) -> None:
        self._inode_by_fd[fd] = inode, _identity(fd)

    def _closed(self, fd: int) -> None:
        self._inode_by_fd.pop(fd, None)

    def _entry(self, path: Any, dir_fd: int | None) -> Entry | None:
        """The entry that a call refers to. None if it is outside of `base`, or if a directory above it does not exist."""
        if dir_fd is not None:
            start = self._inode_of_fd(dir_fd)
            parts = Path(os.fsdecode(path)).parts
        else:
            start = ROOT
            absolute = _absolute(path)
            if self.base not in absolute.parents:
                return None
            parts = absolute.relative_to(self.base).parts
        for part in parts[:-1]:
            start = None if start is None else self.live.names.get(start, {}).get(part)
        return None if start is None or start not in self.live.names else (start, parts[-1])

    def _inode(self, path: Any, dir_fd: int | None = None) -> int | None:
        if isinstance(path, int):
            return self._inode_of_fd(path)
        if dir_fd is None and _absolute(path) == self.base:
            return ROOT
        entry = self._entry(path, dir_fd)
        return None if entry is None else self.live.lookup(entry)

    def _inode_of_fd(self, fd: int) -> int | None:
        inode, identity = self._inode_by_fd.get(fd, (None, None))
        return inode if inode is not None and identity == _identity(fd) else None

    def _path(self, inode: int) -> str:
        """The current path of an inode, relative to `base`."""
        for directory, names in self.live.names.items():
            for name, found in names.items():
                if found == inode:
                    return self._named((directory, name))
        return "" if inode == ROOT else "gone"

    def _named(self, entry: Entry) -> str:
        above = self._path(entry[0])
        return f"{above}/{entry[1]}" if above else entry[1]


def _absolute(path: Any) -> Path:
    return Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - links are not followed


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
