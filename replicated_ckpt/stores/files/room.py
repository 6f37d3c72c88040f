"""How much room a file system has left for this user."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import index
from typing import Any


@dataclass(frozen=True)
class Room:
    """Of the file system that a root lies on. `free_bytes` is what a user without privileges may still write."""

    free_bytes: int
    size_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Room":
        """Raises KeyError, TypeError, ValueError: these fields say no room; the caller names the node that sent them."""
        room = cls(index(fields["free_bytes"]), index(fields["size_bytes"]))
        if not 0 <= room.free_bytes <= room.size_bytes:
            raise ValueError(f"no room of a file system: {room!r}"[:200])
        return room
