"""Sources: the nodes from which one reader gets each shard, in a printable order of preference."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import OBJECT_NODE


def source_orders(
    size_by_shard: Mapping[str, int],
    holders_by_shard: Mapping[str, Collection[str]],
    own_node: str,
    reader_key: str,
) -> dict[str, tuple[str, ...]]:
    """The sources of each shard: the own store, then peers, those with the fewest planned bytes first, then the bucket.

    Between equally loaded peers a hash of `reader_key`, which differs between readers, and the shard decides. So many
    readers spread over the holders without communication. A shard without sources is lost.
    """
    planned_bytes: dict[str, int] = {}
    orders: dict[str, tuple[str, ...]] = {}
    # The largest first: small shards then even out the load.
    for shard in sorted(size_by_shard, key=lambda name: (-size_by_shard[name], name)):
        peers = sorted(
            (node for node in holders_by_shard.get(shard, ()) if node != own_node),
            key=lambda node: (
                # The bucket last: it is slower than a peer, and its reads may cost money.
                node == OBJECT_NODE,
                planned_bytes.get(node, 0),
                crc32c(f"{reader_key}/{shard}/{node}".encode()),
            ),
        )
        own = [own_node] if own_node in holders_by_shard.get(shard, ()) else []
        if peers and not own:
            planned_bytes[peers[0]] = planned_bytes.get(peers[0], 0) + size_by_shard[shard]
        orders[shard] = (*own, *peers)
    return orders


@dataclass(frozen=True)
class ByteRange:
    """A range of a shard's file, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def end_of(ranges: Iterable[ByteRange]) -> int:
    """The end of the last range; 0 without ranges."""
    return max((one.end for one in ranges), default=0)
