"""The operations of a file system in order: the log that a power loss cuts off, and the disk that results from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = 0
"""Inode of the directory below which everything is recorded."""

Entry = tuple[int, str]
"""A name: the inode of its directory, and the name in it."""

Tree = Mapping[str, bytes | None]
"""What a directory holds: relative path -> bytes of a file, None for a directory."""


@dataclass(frozen=True)
class Names:
    """One atomic change of names: each entry gets an inode, or None if the name is removed. `what` is the call that
    made the change.
    """

    what: str
    changes: tuple[tuple[Entry, int | None], ...]

    def __str__(self) -> str:
        return f"{self.what} {', '.join(f'{directory}/{name}' for directory, name in self.entries)}"

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for entry, _ in self.changes)

    @property
    def directories(self) -> frozenset[int]:
        return frozenset(directory for directory, _ in self.entries)


@dataclass(frozen=True)
class Write:
    """Bytes written into a file at an offset."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    """A file cut or extended to a size."""

    inode: int
    size_bytes: int


@dataclass(frozen=True)
class Sync:
    """An fsync or fdatasync of a file or a directory that returned."""

    inode: int


@dataclass(frozen=True)
class Mark:
    """The values of `subject` that the node promises from this moment on. A later mark of the same subject replaces
    this one.
    """

    subject: str
    allowed: tuple[object, ...]


Operation = Names | Write | Truncate | Sync | Mark


@dataclass
class Disk:
    """Names and bytes by inode. Inodes are numbered by the recorder and never reused."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> "Disk":
        return Disk({inode: dict(entries) for inode, entries in self.names.items()}, dict(self.contents))

    def lookup(self, entry: Entry) -> int | None:
        return self.names[entry[0]].get(entry[1])

    def apply(self, operation: Operation) -> None:
        if isinstance(operation, Names):
            self.make_inodes(operation)
            for (directory, name), inode in operation.changes:
                if inode is None:
                    self.names[directory].pop(name, None)
                else:
                    self.names[directory][name] = inode
        elif isinstance(operation, Write | Truncate):
            self.contents[operation.inode] = changed(self.contents[operation.inode], operation)

    def make_inodes(self, operation: Names) -> None:
        """Creates the operation's new inodes, empty and without a name."""
        for _, inode in operation.changes:
            if inode is None or inode in self.names or inode in self.contents:
                continue
            if operation.what == "mkdir":
                self.names[inode] = {}
            else:
                self.contents[inode] = b""

    def reachable(self) -> set[int]:
        """Inodes that have a name on a path from the root."""
        found = {ROOT}
        waiting = [ROOT]
        while waiting:
            for inode in self.names[waiting.pop()].values():
                if inode not in found:
                    found.add(inode)
                    waiting += [inode] if inode in self.names else []
        return found

    def tree(self) -> dict[str, bytes | None]:
        """Path and bytes of everything that is reachable from the root. Directories have None."""
        found: dict[str, bytes | None] = {}
        waiting = [("", ROOT)]
        while waiting:
            prefix, directory = waiting.pop()
            for name, inode in self.names[directory].items():
                if inode in self.names:
                    found[prefix + name] = None
                    waiting.append((f"{prefix}{name}/", inode))
                else:
                    found[prefix + name] = self.contents[inode]
        return found

    def unused_inode(self) -> int:
        return 1 + max([*self.names, *self.contents])


def changed(content: bytes, operation: Write | Truncate) -> bytes:
    """A file's bytes after one write or truncation. Bytes beyond the old end are zero."""
    if isinstance(operation, Truncate):
        return content[: operation.size_bytes].ljust(operation.size_bytes, b"\0")
    end = operation.offset + len(operation.data)
    return content[: operation.offset].ljust(operation.offset, b"\0") + operation.data + content[end:]


@dataclass
class Log:
    """A durable disk, and the operations since then."""

    initial: Disk = field(default_factory=Disk)
    operations: list[Operation] = field(default_factory=list)

    def up_to(self, count: int) -> "Log":
        """The first `count` operations. Shares no list with this log."""
        return Log(self.initial.copy(), self.operations[:count])

    def replayed(self) -> Disk:
        """The disk after all operations, with none lost."""
        disk = self.initial.copy()
        for operation in self.operations:
            disk.apply(operation)
        return disk


def tree_of(path: Path) -> dict[str, bytes | None]:
    """The real tree below a directory."""
    return {
        found.relative_to(path).as_posix(): None if found.is_dir() else found.read_bytes() for found in path.rglob("*")
    }


def disk_of(tree: Tree) -> Disk:
    """A disk that holds the tree, all of it durable."""
    disk = Disk()
    inode_by_path = {"": ROOT}
    for number, (path, content) in enumerate(sorted(tree.items()), ROOT + 1):
        parent, _, name = path.rpartition("/")
        disk.names[inode_by_path[parent]][name] = number
        inode_by_path[path] = number
        if content is None:
            disk.names[number] = {}
        else:
            disk.contents[number] = content
    return disk


def build(tree: Tree, path: Path) -> None:
    """Creates the directory `path` with the contents of the tree."""
    path.mkdir()
    for name, content in sorted(tree.items()):
        if content is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(content)
