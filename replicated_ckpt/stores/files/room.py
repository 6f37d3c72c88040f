"""Free room of a file system for this user, and whether files can be written there at all."""

import errno
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any

from replicated_ckpt.stores.files.durable import write_all
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.wording import one_line

_TRIED_BYTES = 4096
_CANNOT_TRY = (errno.EOPNOTSUPP, errno.EISDIR)
"""Errors of a file system without O_TMPFILE."""
_WORDS_MAX = 200
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True)
class Room:
    """The free space of the file system of a root. A user without privileges may still write `free_bytes`.

    `write_error`: why no file can be written there now; "" if a file can be written, or this was not tried.
    """

    free_bytes: int
    size_bytes: int
    write_error: str = ""

    @property
    def writable_bytes(self) -> int | None:
        """Bytes that can be written there now, as far as that was tried; None: the file system reports no size."""
        return 0 if self.write_error else self.free_bytes if self.size_bytes else None

    def to_json(self) -> dict[str, int | str | bool]:
        return {**asdict(self), "is_writable": not self.write_error}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Room":
        """Raises KeyError, TypeError, ValueError: the fields are invalid; the caller names the node that sent them."""
        why = one_line(str(fields.get("write_error", "")), _WORDS_MAX)
        room = cls(index(fields["free_bytes"]), index(fields["size_bytes"]), why)
        if not 0 <= room.free_bytes <= room.size_bytes:
            raise ValueError(f"not the room of a file system: {room!r}"[:200])
        return room


def find_free_bytes(path: Path) -> int:
    """Bytes that a user without privileges may still write on the file system of a path. Raises: OSError

    A ramfs, or a tmpfs of `size=0`, reports only zeros. It is not full: it has no limit.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else _UNLIMITED_BYTES


def find_write_error(directory: Path, size_bytes: int = _TRIED_BYTES) -> OSError | None:
    """Tries to write a file in a directory; returns the error. None: it worked, or cannot be tried. No file is left."""
    try:
        # Tried, not computed: statvfs shows neither quotas nor used-up inodes.
        with closing_fd(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)) as fd:
            write_all(fd, bytes(size_bytes))
    except OSError as exc:
        return None if exc.errno in _CANNOT_TRY else exc
    return None
