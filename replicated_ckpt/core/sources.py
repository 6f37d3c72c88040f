"""Sources: who serves which shard to one reader, as a printable order of preference."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from replicated_ckpt.core.checksum import crc32c
from replicated_ckpt.core.layout import OBJECT_NODE


@dataclass(frozen=True)
class SourceOrder:
    """Nodes to read one shard from, best first. Empty: the shard is lost."""

    shard: str
    nodes: tuple[str, ...]


def source_orders(
    size_by_shard: Mapping[str, int],
    holders_by_shard: Mapping[str, Collection[str]],
    own_node: str,
    reader_key: str,
) -> tuple[SourceOrder, ...]:
    """Order of sources per shard: own store, then the peers, each with the least planned bytes first, then the bucket.

    Ties between equally loaded peers are broken by a hash of `reader_key` (which differs between readers) and the
    shard, so that many readers spread over the holders without talking to each other.
    """
    planned_bytes: dict[str, int] = {}
    orders = []
    for shard in sorted(size_by_shard, key=lambda name: (-size_by_shard[name], name)):
        peers = sorted(
            (node for node in holders_by_shard.get(shard, ()) if node != own_node),
            key=lambda node: (
                node == OBJECT_NODE,
                planned_bytes.get(node, 0),
                crc32c(f"{reader_key}/{shard}/{node}".encode()),
            ),
        )
        own = [own_node] if own_node in holders_by_shard.get(shard, ()) else []
        if peers and not own:
            planned_bytes[peers[0]] = planned_bytes.get(peers[0], 0) + size_by_shard[shard]
        orders.append(SourceOrder(shard, (*own, *peers)))
    return tuple(orders)


@dataclass(frozen=True)
class ByteRange:
    """A range of a shard's file, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def merged(
    ranges: Sequence[ByteRange], gap_bytes: int, length_max: int
) -> tuple[tuple[ByteRange, tuple[int, ...]], ...]:
    """Ranges joined where they lie within `gap_bytes` of each other, none growing beyond `length_max` by joining.

    Returns pairs of the joined range and the indices of `ranges` within it. A single range may exceed `length_max`.
    """
    joined: list[tuple[ByteRange, list[int]]] = []
    for index in sorted(range(len(ranges)), key=lambda position: ranges[position].offset):
        item = ranges[index]
        if joined:
            last, members = joined[-1]
            end = max(last.end, item.end)
            if item.offset - last.end <= gap_bytes and end - last.offset <= length_max:
                joined[-1] = (ByteRange(last.offset, end - last.offset), [*members, index])
                continue
        joined.append((item, [index]))
    return tuple((span, tuple(members)) for span, members in joined)
