"""The inventory: what a look at the stores finds now, and what follows from it: what can be loaded, and what is newest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from operator import index
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_MAX, ShardName, is_checkpoint_id, is_save_id


@dataclass(frozen=True)
class Holding:
    """What one node's store holds of one committed save. `sizes` maps shard name to bytes of the file found there.

    `damaged` are those of them that the node knows to be bad: they stay where they are until a good copy replaces them,
    as their other blocks may be all that is left of something. `created_unix_s` is when the save was made, by the clock
    of its coordinator: only groups of nodes that never met give two saves the same sequence, and then it decides.
    """

    node_id: str
    checkpoint_id: str
    save_id: str
    sequence: int
    has_metadata: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    created_unix_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "checkpoint_id": self.checkpoint_id,
            "save_id": self.save_id,
            "sequence": self.sequence,
            "has_metadata": self.has_metadata,
            "sizes": dict(self.sizes),
            "damaged": list(self.damaged),
            "created_unix_s": self.created_unix_s,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Holding":
        """Holding described by `fields`, validated.

        Raises:
            ValueError, KeyError, TypeError: it is not one; the caller names the peer that said so.
        """
        sizes = {str(name): index(size) for name, size in dict(fields["sizes"]).items()}
        holding = cls(
            str(fields["node_id"]),
            str(fields["checkpoint_id"]),
            str(fields["save_id"]),
            index(fields["sequence"]),
            bool(fields["has_metadata"]),
            sizes,
            tuple(str(name) for name in fields.get("damaged", ()) if name in sizes),
            float(fields.get("created_unix_s", 0.0)),
        )
        if (
            not is_checkpoint_id(holding.checkpoint_id)
            or not is_save_id(holding.save_id)
            or not 0 <= holding.sequence <= SEQUENCE_MAX
            or any(ShardName.parse(name) is None or size < 0 for name, size in sizes.items())
        ):
            raise ValueError(f"no valid holding: {holding!r}"[:500])
        return holding


@dataclass(frozen=True)
class SaveFound:
    """One committed save as the reachable stores hold it together."""

    checkpoint_id: str
    save_id: str
    sequence: int
    holdings: tuple[Holding, ...]

    @property
    def order(self) -> tuple[int, float, str]:
        """Compares saves: the larger is the newer. A clock decides only between groups that did not know of each other."""
        created = max((holding.created_unix_s for holding in self.holdings), default=0.0)
        return self.sequence, 0.0 if isnan(created) else created, self.save_id

    def holders_of(self, shard: str, size_bytes: int) -> tuple[str, ...]:
        """Nodes whose copy of `shard` has the right size. A copy of another size is as good as none."""
        return tuple(node for node, size in self._copies_by_shard.get(shard, ()) if size == size_bytes)

    @cached_property
    def _copies_by_shard(self) -> Mapping[str, list[tuple[str, int]]]:
        """Node and size of each copy, listed once: a save of many shards has about as many nodes to look at for each."""
        copies: dict[str, list[tuple[str, int]]] = {}
        for holding in self.holdings:
            for shard, size in holding.sizes.items():
                copies.setdefault(shard, []).append((holding.node_id, size))
        return copies

    def lacking(self, size_by_shard: Mapping[str, int]) -> tuple[str, ...]:
        """Shards without any holder."""
        return tuple(shard for shard, size in sorted(size_by_shard.items()) if not self.holders_of(shard, size))


def saves_found(holdings: Iterable[Holding]) -> tuple[SaveFound, ...]:
    """The committed saves among `holdings`, newest first: by sequence, and by the clock only where two have the same."""
    grouped: dict[tuple[str, str], list[Holding]] = {}
    for holding in holdings:
        grouped.setdefault((holding.checkpoint_id, holding.save_id), []).append(holding)
    saves = [
        SaveFound(checkpoint_id, save_id, max(holding.sequence for holding in members), tuple(members))
        for (checkpoint_id, save_id), members in grouped.items()
    ]
    return tuple(sorted(saves, key=lambda save: save.order, reverse=True))
