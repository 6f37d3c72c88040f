"""The inventory: the files found in the stores now, and the checkpoints that can be loaded from them, in order."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_MAX, ShardName, is_checkpoint_id, is_lineage, is_save_id
from replicated_ckpt.core.lineage import Version, moment, order_by_age
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.wording import one_line


@dataclass(frozen=True)
class Holding:
    """The files of one committed save in one node's store. `sizes` maps shard name to bytes of the file found there.

    `damaged` are the shards that the node has found to be bad. They stay until a good copy replaces them, since their
    other blocks may be the only copies. `footer_damaged` are the shards in `damaged` with only a bad footer: a copy can
    be made from them. `created_unix_s` is the time of the save by its coordinator's clock. It orders lineages, and
    saves with the same sequence from nodes without contact. `is_replaced`: a newer save is published on that node, and
    this one stays until the newer one was seen whole. `is_slim`: the node has dropped its optimizer.
    """

    node_id: str
    checkpoint_id: str
    save_id: str
    sequence: int
    has_metadata: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    created_unix_s: float = 0.0
    lineage: str = ""
    is_replaced: bool = False
    footer_damaged: tuple[str, ...] = ()
    is_slim: bool = False

    @classmethod
    def of_save(
        cls, save: Manifest, node_id: str, checkpoint_id: str, has_metadata: bool, sizes: Mapping[str, int]
    ) -> "Holding":
        """A node's holding of the save of this manifest, without damaged shards."""
        named = node_id, checkpoint_id, save.save_id, save.sequence
        found = cls(*named, has_metadata, sizes, created_unix_s=save.created_unix_s, lineage=save.lineage)
        return replace(found, is_slim=True) if save.is_slim else found

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.sequence, self.created_unix_s, self.save_id)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sizes": dict(self.sizes)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Holding":
        """Raises ValueError, KeyError, TypeError: the fields are invalid. The caller adds the name of the peer."""
        sizes = {str(name): index(size) for name, size in dict(fields["sizes"]).items()}
        holding = cls(
            one_line(fields["node_id"]),
            str(fields["checkpoint_id"]),
            str(fields["save_id"]),
            index(fields["sequence"]),
            bool(fields["has_metadata"]),
            sizes,
            # Names that the listing lacks are dropped: nothing else bounds their number.
            tuple(str(name) for name in fields.get("damaged", ()) if name in sizes),
            moment(fields.get("created_unix_s", 0.0)),
            str(fields.get("lineage", "")),
            fields.get("is_replaced") is True,
            tuple(str(name) for name in fields.get("footer_damaged", ()) if name in sizes),
            fields.get("is_slim") is True,
        )
        if (
            # Ids and names of a peer become paths on this node.
            not is_checkpoint_id(holding.checkpoint_id)
            or not is_save_id(holding.save_id)
            or not is_lineage(holding.lineage)
            or not 0 <= holding.sequence <= SEQUENCE_MAX
            or any(ShardName.parse(name) is None or size < 0 for name, size in sizes.items())
        ):
            raise ValueError(f"not a valid holding: {holding!r}"[:500])
        return holding


@dataclass(frozen=True)
class SaveFound:
    """One committed save with its holdings in all reachable stores."""

    checkpoint_id: str
    save_id: str
    sequence: int
    holdings: tuple[Holding, ...]

    @cached_property
    def version(self) -> Version:
        """The version by which saves are ordered. Cached: a plan needs it a dozen times for each checkpoint."""
        created = max((holding.version.order[1] for holding in self.holdings), default=0.0)
        lineage = next((holding.lineage for holding in self.holdings), "")
        return Version(lineage, self.sequence, created, self.save_id)

    def holders_of(self, shard: str, size_bytes: int) -> tuple[str, ...]:
        """Nodes whose copy of `shard` has the right size. A copy of another size does not count."""
        return tuple(node for node, size in self._copies_by_shard.get(shard, ()) if size == size_bytes)

    @cached_property
    def _copies_by_shard(self) -> Mapping[str, list[tuple[str, int]]]:
        """Node and size of each copy, by shard. Indexed once: with many shards and nodes a search for each is quadratic."""
        copies: dict[str, list[tuple[str, int]]] = {}
        for holding in self.holdings:
            for shard, size in holding.sizes.items():
                copies.setdefault(shard, []).append((holding.node_id, size))
        return copies

    def has_any(self, shards: Iterable[str]) -> bool:
        """Whether each of these shards has a file somewhere, even of another size: its data may be intact."""
        return all(shard in self._copies_by_shard for shard in shards)

    @property
    def damaged_copies(self) -> frozenset[tuple[str, str]]:
        """Node and shard of each copy whose data is known to be damaged."""
        return frozenset(
            (h.node_id, shard) for h in self.holdings for shard in h.damaged if shard not in h.footer_damaged
        )

    def is_whole(self, size_by_shard: Mapping[str, int], damaged: Collection[tuple[str, str]] = ()) -> bool:
        """Whether every shard and the metadata have a copy; `damaged` as for `list_missing`."""
        return not self.list_missing(size_by_shard, damaged) and any(holding.has_metadata for holding in self.holdings)

    def is_described_to(self, nodes: Collection[str], hung: Collection[str]) -> bool:
        """Whether ranks on all these nodes can read `.metadata`: from their own disk, or from a node that is not `hung`."""
        having = {holding.node_id for holding in self.holdings if holding.has_metadata}
        return not having.issubset(hung) or having.issuperset(nodes)

    def list_missing(
        self, size_by_shard: Mapping[str, int], damaged: Collection[tuple[str, str]] = ()
    ) -> tuple[str, ...]:
        """Shards without a holder, or with a single holder whose copy is in `damaged`.

        A shard with several damaged copies is not missing: blocks that are bad in one may be good in another.
        """
        holders = {shard: self.holders_of(shard, size) for shard, size in sorted(size_by_shard.items())}
        return tuple(
            shard for shard, nodes in holders.items() if not nodes or (len(nodes) == 1 and (nodes[0], shard) in damaged)
        )


@dataclass(frozen=True)
class LineageFound:
    """A lineage in the reachable stores: its newest checkpoint, the time of that save, and all nodes with files of it."""

    lineage: str
    newest_id: str
    created_unix_s: float
    nodes: tuple[str, ...]


def lineages_found(saves: Iterable[SaveFound]) -> tuple[LineageFound, ...]:
    """The lineages of these saves, in the order of `saves_found`: the one with the latest save comes first.

    Stock torch's checkpoints have no lineage, and are left out.
    """
    grouped: dict[str, list[SaveFound]] = {}
    for save in saves:
        if save.version.lineage or save.sequence:
            grouped.setdefault(save.version.lineage, []).append(save)
    return tuple(
        LineageFound(
            lineage,
            members[0].checkpoint_id,
            members[0].version.order[1],
            tuple(sorted({holding.node_id for save in members for holding in save.holdings})),
        )
        for lineage, members in grouped.items()
    )


def saves_found(holdings: Iterable[Holding]) -> tuple[SaveFound, ...]:
    """The committed saves among `holdings`: the lineage with the latest save first, and in each its newest save first."""
    grouped: dict[tuple[str, str], list[Holding]] = {}
    for holding in holdings:
        grouped.setdefault((holding.checkpoint_id, holding.save_id), []).append(holding)
    saves = [
        SaveFound(checkpoint_id, save_id, max(holding.sequence for holding in members), tuple(members))
        for (checkpoint_id, save_id), members in grouped.items()
    ]
    place = order_by_age(save.version for save in saves)
    return tuple(sorted(saves, key=lambda save: place(save.version), reverse=True))
