"""How much room a file system has left for this user."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from replicated_ckpt.stores.files.durable import translate_errors


@dataclass(frozen=True)
class Room:
    """Of the file system that a root lies on. `free_bytes` is what a user without privileges may still write."""

    free_bytes: int
    size_bytes: int

    def to_json(self) -> dict[str, int]:
        return {"free_bytes": self.free_bytes, "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Room":
        """Raises KeyError, TypeError, ValueError: these fields say no room; the caller names the node that sent them."""
        room = cls(index(fields["free_bytes"]), index(fields["size_bytes"]))
        if not 0 <= room.free_bytes <= room.size_bytes:
            raise ValueError(f"no room of a file system: {room!r}"[:200])
        return room


def measure_room(root: Path) -> Room:
    """Raises StoreError."""
    with translate_errors(str(root), "measure", ""):
        found = os.statvfs(root)
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
