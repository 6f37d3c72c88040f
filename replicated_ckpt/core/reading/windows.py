"""The plan of reads: from which nodes shards are read, in which pieces (windows), and by which rank of a node."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES, crc32c
from replicated_ckpt.core.layout import OBJECT_NODE


def source_orders(
    size_by_shard: Mapping[str, int],
    holders_by_shard: Mapping[str, Collection[str]],
    own_node: str,
    reader_key: str,
) -> dict[str, tuple[str, ...]]:
    """The sources of each shard: the own store, then peers, those with the fewest planned bytes first, then the bucket.

    Between equally loaded peers a hash of `reader_key`, which differs between readers, and the shard decides. This
    spreads the readers over the holders without communication. A shard without sources is lost.
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


CELL_BYTES = 4 << 20
"""Shards are cut at multiples of this. Ranks of a node share data by cells."""
LOCAL_WINDOW_BYTES = 1 << 20
"""Window of the node's own disk: small enough to stay in the processor's cache until it is copied."""
SHARDS_AT_ONCE = 4
"""Shards that are read alternately, since they may lie on different nodes."""
STRAIGHT_BYTES_MIN = 512 << 10
"""Smaller ranges are not worth a read of their own."""


@dataclass(frozen=True)
class Window:
    """Bytes of a shard that are read at once. A window never crosses the border of a cell."""

    shard: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def cell(self) -> tuple[str, int]:
        return (self.shard, self.offset // CELL_BYTES)

    @property
    def blocks(self) -> range:
        """The blocks that are read for it: a checksum covers a whole block."""
        return range(self.offset // BLOCK_BYTES, -(-self.end // BLOCK_BYTES))


@dataclass(frozen=True)
class Unit:
    """A window that one rank of a node fetches for several. `takers` are all ranks that need it, in order."""

    window: Window
    fetcher: int
    takers: tuple[int, ...]


def windows_of(
    shard: str, ranges: Iterable[ByteRange], window_bytes: int, straight: Iterable[ByteRange] = ()
) -> list[Window]:
    """The windows that cover `ranges`, in ascending order. Ranges are joined if that reads no further block.

    `window_bytes` divides CELL_BYTES and is a multiple of BLOCK_BYTES. The whole blocks of each range in `straight` get
    windows of their own, so that they can be read directly into their target.
    """
    runs: list[list[int]] = []
    for part in sorted(ranges, key=lambda part: part.offset):
        # An empty tensor has a place, and no bytes to read.
        if part.length == 0:
            continue
        if runs and part.offset // BLOCK_BYTES <= (runs[-1][1] - 1) // BLOCK_BYTES + 1:
            runs[-1][1] = max(runs[-1][1], part.end)
        else:
            runs.append([part.offset, part.end])
    borders = sorted({border for part in straight for border in _borders(part)})
    windows = []
    for start, end in runs:
        cuts = {*range((start // window_bytes + 1) * window_bytes, end, window_bytes)}
        cuts.update(borders[bisect_right(borders, start) : bisect_left(borders, end)])
        windows += [Window(shard, first, last - first) for first, last in pairwise((start, *sorted(cuts), end))]
    return windows


def _borders(part: ByteRange) -> tuple[int, ...]:
    """Start and end of the whole blocks of a range; empty if they are less than STRAIGHT_BYTES_MIN."""
    start, end = -(-part.offset // BLOCK_BYTES) * BLOCK_BYTES, part.end // BLOCK_BYTES * BLOCK_BYTES
    return (start, end) if end - start >= STRAIGHT_BYTES_MIN else ()


def in_order(windows: Iterable[Window], shards: Sequence[str]) -> list[Window]:
    """The order in which every rank reads. `shards` are all shards of the save, in the same order on all ranks.

    All ranks reach common cells in the same order, so ranks that wait for each other cannot form a circle.
    """
    place = {shard: index for index, shard in enumerate(shards)}

    def key(window: Window) -> tuple[int, int, int, int]:
        index = place[window.shard]
        return (index // SHARDS_AT_ONCE, window.offset // CELL_BYTES, index, window.offset)

    return sorted(windows, key=key)


def plan_shared_units(windows_by_rank: Mapping[int, Sequence[Window]], shards: Sequence[str]) -> tuple[Unit, ...]:
    """The windows that ranks of one node fetch for each other, in reading order.

    They lie in cells with a block that several ranks need. Of the ranks that need a cell, the one with the fewest planned
    blocks fetches it: one window, from the first byte that any of them needs to the last.
    """
    needs: dict[tuple[str, int], dict[int, list[Window]]] = {}
    for rank in sorted(windows_by_rank):
        for window in windows_by_rank[rank]:
            needs.setdefault(window.cell, {}).setdefault(rank, []).append(window)
    takers_by_window: dict[Window, tuple[int, ...]] = {}
    for (shard, _), windows_by_taker in needs.items():
        parts = [window for windows in windows_by_taker.values() for window in windows]
        start = min(part.offset for part in parts)
        hull = Window(shard, start, max(part.end for part in parts) - start)
        blocks = [block for part in parts for block in part.blocks]
        # Ranks that need different blocks of a cell share nothing: each reads its own.
        if len(windows_by_taker) > 1 and len(blocks) > len(set(blocks)):
            takers_by_window[hull] = tuple(windows_by_taker)
    units = []
    planned_blocks = dict.fromkeys(windows_by_rank, 0)
    for window in in_order(takers_by_window, shards):
        takers = takers_by_window[window]
        fetcher = min(takers, key=lambda rank: (planned_blocks[rank], rank))
        planned_blocks[fetcher] += len(window.blocks)
        units.append(Unit(window, fetcher, takers))
    return tuple(units)
