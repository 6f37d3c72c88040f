"""Windows: the pieces in which shards are read, in an order that all ranks keep; and which rank fetches which."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.core.reading.source_order import ByteRange

CELL_BYTES = 4 << 20
"""Shards are cut at multiples of it; what ranks share is shared by cells."""
LOCAL_WINDOW_BYTES = 1 << 20
"""Of the node's own disk: small enough that its bytes are still in the processor's cache when they are copied on."""
SHARDS_AT_ONCE = 4
"""So many shards are read alternately, as they may lie on different nodes."""
STRAIGHT_BYTES_MIN = 512 << 10
"""Of less it is not worthwhile to read it by itself."""


@dataclass(frozen=True)
class Window:
    """Bytes of a shard that are read at once; never across the border of a cell."""

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
        """What is read for it, as a block is checked as a whole."""
        return range(self.offset // BLOCK_BYTES, -(-self.end // BLOCK_BYTES))


@dataclass(frozen=True)
class Unit:
    """What one rank of a node fetches for several: the ranks that need it, in order, itself among them."""

    window: Window
    fetcher: int
    takers: tuple[int, ...]


def windows_of(
    shard: str, ranges: Iterable[ByteRange], window_bytes: int, straight: Iterable[ByteRange] = ()
) -> list[Window]:
    """The windows that cover `ranges`, in ascending order. Ranges are joined where no block is read for it.

    `window_bytes` divides CELL_BYTES and is a multiple of BLOCK_BYTES. The whole blocks of each range of `straight` have
    windows of their own, so that these can be read to where they belong.
    """
    runs: list[list[int]] = []
    for part in sorted(ranges, key=lambda part: part.offset):
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
    """Where the whole blocks of a range begin and end, if they are worthwhile."""
    start, end = -(-part.offset // BLOCK_BYTES) * BLOCK_BYTES, part.end // BLOCK_BYTES * BLOCK_BYTES
    return (start, end) if end - start >= STRAIGHT_BYTES_MIN else ()


def in_order(windows: Iterable[Window], shards: Sequence[str]) -> list[Window]:
    """The order in which every rank reads; `shards` are all of the save, in any order that the ranks agree on.

    Two ranks that need the same cells come to them in the same order: so ranks that wait for each other cannot do so
    in a circle.
    """
    place = {shard: index for index, shard in enumerate(shards)}

    def key(window: Window) -> tuple[int, int, int, int]:
        index = place[window.shard]
        return (index // SHARDS_AT_ONCE, window.offset // CELL_BYTES, index, window.offset)

    return sorted(windows, key=key)


def plan_shared_units(windows_by_rank: Mapping[int, Sequence[Window]], shards: Sequence[str]) -> tuple[Unit, ...]:
    """What the ranks of one node fetch for each other, in order: the cells of which some block is needed by several.

    Of the ranks that need a cell, the one fetches it that has the least to fetch so far; all that lies between their
    needs, too.
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
