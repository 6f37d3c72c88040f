"""Checkpoints of FileSystemWriter on nodes: the files of each node, and the checkpoints that they form together.

Without a manifest only `.metadata` and sizes show which files belong together. Files that contradict each other are never
combined.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import index
from typing import Any

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import METADATA_NAME, ShardName, is_checkpoint_id
from replicated_ckpt.core.lineage import moment
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import Fields, Made, Pairs, PickleUnsafe
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.errors import CheckpointAmbiguous, MetadataUnsafe
from replicated_ckpt.wording import one_line

SEQUENCE = 0
"""Stock torch has no sequence: its checkpoints count as older than all of ours."""
NOBODY = "unknown"
_SLACK_S = 60.0
"""Allowance for clock differences between nodes: shards are written before `.metadata`."""


@dataclass(frozen=True)
class UnmanagedFile:
    """One file on a node. `print_crc32c`: the CRC32C of all of `.metadata`, or of the two ends of a shard."""

    size_bytes: int
    print_crc32c: int
    modified_unix_s: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "UnmanagedFile":
        size, print_crc = index(fields["size_bytes"]), index(fields["print_crc32c"])
        if size < 0 or not 0 <= print_crc < 1 << 32:
            raise ValueError(f"not a file of a checkpoint: {fields!r}"[:300])
        return cls(size, print_crc, moment(fields["modified_unix_s"]))

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes, fingerprint {self.print_crc32c:08x}"

    @property
    def identity(self) -> tuple[int, int]:
        return self.size_bytes, self.print_crc32c


@dataclass(frozen=True)
class UnmanagedHolding:
    """The files of one checkpoint without a manifest on one node."""

    node_id: str
    checkpoint_id: str
    metadata: UnmanagedFile | None
    shards: Mapping[str, UnmanagedFile] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "UnmanagedHolding":
        """Raises ValueError, KeyError, TypeError: the fields are invalid. The caller adds the name of the peer."""
        metadata = fields["metadata"]
        shards = {str(name): UnmanagedFile.from_json(file) for name, file in dict(fields["shards"]).items()}
        checkpoint_id = str(fields["checkpoint_id"])
        if not is_checkpoint_id(checkpoint_id) or any(ShardName.parse(name) is None for name in shards):
            raise ValueError(f"not a holding of a checkpoint: {checkpoint_id!r}"[:300])
        return cls(
            one_line(fields["node_id"]),
            checkpoint_id,
            None if metadata is None else UnmanagedFile.from_json(metadata),
            shards,
        )


@dataclass(frozen=True)
class UnmanagedCheckpoint:
    """One checkpoint id with the holdings of all reached nodes."""

    checkpoint_id: str
    holdings: tuple[UnmanagedHolding, ...]

    @property
    def nodes_with_metadata(self) -> tuple[str, ...]:
        return tuple(holding.node_id for holding in self.holdings if holding.metadata is not None)

    @property
    def modified_unix_s(self) -> float:
        """The modification time of `.metadata`: such checkpoints have no other order. 0: there is no `.metadata`."""
        return max((held.metadata.modified_unix_s for held in self.holdings if held.metadata is not None), default=0.0)

    def metadata(self) -> UnmanagedFile:
        """The `.metadata` of the checkpoint, if all nodes that have one agree.

        Raises:
            CheckpointAmbiguous: nodes have different ones: two runs used one id. KeyError: no node has one.
        """
        found = {held.node_id: held.metadata for held in self.holdings if held.metadata is not None}
        return _only(self.checkpoint_id, METADATA_NAME, found)

    def save(self, needed_bytes: Mapping[str, int]) -> "UnmanagedSave":
        """The files that form the checkpoint. `needed_bytes`: the bytes of each shard that `.metadata` refers to.

        Raises:
            CheckpointAmbiguous: nodes have different files for one shard, and each is long enough.
        """
        metadata, refused = self.metadata(), list[str]()
        holders: dict[str, dict[str, UnmanagedFile]] = {}
        for shard, needed in needed_bytes.items():
            held = {h.node_id: h.shards[shard] for h in self.holdings if shard in h.shards}
            holders[shard] = {node: file for node, file in held.items() if file.size_bytes >= needed}
            refused += [
                (
                    f"node {node} has {shard} of {file.size_bytes} bytes, but .metadata needs {needed}: it is from another "
                    "save"
                )
                for node, file in held.items()
                if file.size_bytes < needed
            ]
            if holders[shard]:
                _only(self.checkpoint_id, shard, holders[shard])
        return UnmanagedSave(self, metadata, dict(needed_bytes), holders, tuple(refused))


def _only(checkpoint_id: str, name: str, file_by_node: Mapping[str, UnmanagedFile]) -> UnmanagedFile:
    # Choosing one of them would mix the shards of two runs unnoticed.
    if len({file.identity for file in file_by_node.values()}) > 1:
        raise CheckpointAmbiguous(checkpoint_id, name, {node: str(file) for node, file in file_by_node.items()})
    return file_by_node[min(file_by_node)]


@dataclass(frozen=True)
class UnmanagedSave:
    """A checkpoint whose files can belong together. `refused` describes the files that cannot, for messages."""

    checkpoint: UnmanagedCheckpoint
    metadata: UnmanagedFile
    needed_bytes: Mapping[str, int]
    holders: Mapping[str, Mapping[str, UnmanagedFile]]
    refused: tuple[str, ...] = ()

    @property
    def checkpoint_id(self) -> str:
        return self.checkpoint.checkpoint_id

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(shard for shard, nodes in self.holders.items() if not nodes)

    @property
    def copies(self) -> int:
        """The smallest number of copies of any shard."""
        return min((len(nodes) for nodes in self.holders.values()), default=0)

    @property
    def save_id(self) -> str:
        """A made-up id, derived from the files: every node derives the same one."""
        size, crc = self.metadata.identity
        return hashlib.sha256(f"stock/{self.checkpoint_id}/{size}/{crc}".encode()).hexdigest()[:32]

    def size_of(self, shard: str) -> int:
        return max((file.size_bytes for file in self.holders[shard].values()), default=self.needed_bytes[shard])

    @cached_property
    def written_later(self) -> tuple[str, ...]:
        """Shards that are newer than `.metadata`: from an interrupted later save, or copied by hand."""
        latest = self.checkpoint.modified_unix_s + _SLACK_S
        return tuple(
            shard
            for shard, files in self.holders.items()
            if files and min(file.modified_unix_s for file in files.values()) > latest
        )

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The save's holdings for the inventory, without files of other saves."""
        return tuple(
            Holding(
                held.node_id,
                self.checkpoint_id,
                self.save_id,
                SEQUENCE,
                held.metadata is not None,
                {
                    shard: held.shards[shard].size_bytes
                    for shard, nodes in self.holders.items()
                    if held.node_id in nodes
                },
                created_unix_s=self.checkpoint.modified_unix_s,
            )
            for held in self.checkpoint.holdings
        )

    @property
    def manifest(self) -> Manifest:
        """A made-up manifest, without checksums of shards, since none exist."""
        shards = {
            shard: ShardEntry(self.size_of(shard), 0, rank_of(shard), min(nodes, default=NOBODY), tuple(sorted(nodes)))
            for shard, nodes in self.holders.items()
        }
        names = [held.node_id for held in self.checkpoint.holdings]
        if any(entry.owner_node == NOBODY for entry in shards.values()):
            names.append(NOBODY)
        nodes = tuple(
            NodeEntry(
                node,
                "no node that was reached" if node == NOBODY else "host not recorded",
                None,
                tuple(sorted({entry.owner_rank for entry in shards.values() if entry.owner_node == node})),
            )
            for node in sorted(names)
        )
        return Manifest(
            save_id=self.save_id,
            checkpoint_id=self.checkpoint_id,
            sequence=SEQUENCE,
            created_unix_s=self.checkpoint.modified_unix_s,
            world_size=1 + max((entry.owner_rank for entry in shards.values()), default=0),
            copies=1,
            metadata_bytes=self.metadata.size_bytes,
            metadata_crc32c=self.metadata.print_crc32c,
            nodes=nodes,
            shards=shards,
        )


def rank_of(shard: str) -> int:
    name = ShardName.parse(shard)
    return name.rank if name else 0


def unmanaged_checkpoints(
    holdings: Iterable[UnmanagedHolding], without: Iterable[str] = ()
) -> tuple[UnmanagedCheckpoint, ...]:
    """The checkpoints among `holdings`, newest first. `without`: ids with a manifest on some node, which are left out."""
    grouped: dict[str, list[UnmanagedHolding]] = {}
    excluded = set(without)
    for holding in holdings:
        if holding.checkpoint_id not in excluded:
            grouped.setdefault(holding.checkpoint_id, []).append(holding)
    found: Sequence[UnmanagedCheckpoint] = [UnmanagedCheckpoint(name, tuple(held)) for name, held in grouped.items()]
    return tuple(sorted(found, key=lambda each: (each.modified_unix_s, each.checkpoint_id), reverse=True))


_STATE_MAX = 128
"""Limit of the keys and values of an instance's state: a shared state is searched once for each of its instances."""


def item_ranges(raw: bytes) -> Mapping[str, tuple[ByteRange, ...]]:
    """The ranges of the items in each shard, as `.metadata` has them, in ascending order.

    Raises:
        MetadataUnsafe: `raw` is not metadata as DCP writes it, or names a file that is not a shard.
    """
    try:
        return _ranges(_attribute(follow(raw), "storage_data"))
    except PickleUnsafe as exc:
        raise MetadataUnsafe(f".metadata {exc}.") from exc


def needed_bytes(ranges: Mapping[str, tuple[ByteRange, ...]]) -> Mapping[str, int]:
    return {shard: max(item.end for item in items) for shard, items in ranges.items()}


def ranges_to_json(ranges: Mapping[str, Sequence[ByteRange]], shards: Collection[str]) -> dict[str, Any]:
    """The ranges in these shards, as JSON for a node that has them."""
    return {shard: [(item.offset, item.length) for item in ranges[shard]] for shard in shards if shard in ranges}


def ranges_from_json(fields: Mapping[str, Any]) -> Mapping[str, tuple[ByteRange, ...]]:
    """The inverse of `ranges_to_json`. Raises TypeError, ValueError, AttributeError: the fields are invalid."""
    found = {shard: tuple(ByteRange(index(at), index(size)) for at, size in items) for shard, items in fields.items()}
    if any(ShardName.parse(shard) is None for shard in found):
        raise ValueError("a file is named that is not a shard")
    numbers = (number for items in found.values() for item in items for number in (item.offset, item.length))
    if any(not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("an item lies outside its file")
    return found


def _attribute(node: Any, wanted: str) -> Any:
    """One attribute of an instance: the last value that the pickle sets."""
    state = node.state if type(node) is Made else None
    if type(state) is Fields and wanted in state:
        return state[wanted]
    if type(state) is Pairs and len(state) <= _STATE_MAX:
        for key, value in zip(state[-2::-2], state[::-2], strict=True):
            if type(key) is str and key == wanted:
                return value
    raise PickleUnsafe(f"lacks {wanted!r} where DCP metadata has it")


def _infos(places: Any) -> Iterator[Any]:
    """The node of each item's place. A shared node is visited once: a few bytes can refer to it a million times."""
    if type(places) is not Pairs:
        raise PickleUnsafe("has no places of its items")
    seen: set[int] = set()
    for info in places[1::2]:
        if id(info) not in seen:
            seen.add(id(info))
            yield info


def _ranges(places: Any) -> Mapping[str, tuple[ByteRange, ...]]:
    found: dict[str, list[ByteRange]] = {}
    for info in _infos(places):
        shard, offset, length = (_attribute(info, name) for name in ("relative_path", "offset", "length"))
        # The path becomes a file name on nodes: nothing but a shard may be named.
        if type(shard) is not str or ShardName.parse(shard) is None:
            raise PickleUnsafe(f"has an item in {str(shard)[:200]!r}, which is not a shard")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise PickleUnsafe(f"has an item at an invalid place of {shard}")
        # More than a file offset: `preadv` would raise OverflowError in the middle of a load.
        if max(offset, length) >= 1 << 63:
            raise PickleUnsafe(f"has an item at an invalid place of {shard}: a number has more than 64 bits")
        found.setdefault(shard, []).append(ByteRange(offset, length))
    return {shard: tuple(sorted(items, key=lambda item: item.offset)) for shard, items in sorted(found.items())}
