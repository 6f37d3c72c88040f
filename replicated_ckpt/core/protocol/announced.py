"""The sizes that a save announces when it opens: no node accepts more bytes of it from peers."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any


@dataclass(frozen=True)
class Announced:
    """Upper bounds, in bytes: of each shard, and of all shards together. 0: nothing is announced."""

    shard_bytes_max: int = 0
    save_bytes_max: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Announced":
        """The announcement in `fields`. Raises TypeError, ValueError: the fields are not an announcement."""
        found = cls(index(fields.get("shard_bytes_max", 0)), index(fields.get("save_bytes_max", 0)))
        if found.shard_bytes_max < 0 or found.save_bytes_max < 0:
            raise ValueError(f"no save has {min(found.shard_bytes_max, found.save_bytes_max)} bytes")
        return found


NOTHING_ANNOUNCED = Announced()
