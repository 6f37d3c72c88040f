"""One rank's loading: goes through the windows in order, wherever their bytes come from, and feeds the items in them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from replicated_ckpt.core.reading.windows import (
    CELL_BYTES,
    LOCAL_WINDOW_BYTES,
    ByteRange,
    Unit,
    Window,
    in_order,
    windows_of,
)
from replicated_ckpt.dcp.load.fetch_ahead import FetchAhead
from replicated_ckpt.dcp.load.item_reader import Feed, ItemReader
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensor
from replicated_ckpt.errors import ShardLost, StoreError
from replicated_ckpt.stores.node_cache.exchange import Exchange

FeedWindow = Callable[[Window, memoryview], None]
PlaceOf = Callable[[Window], memoryview | None]


@dataclass(frozen=True)
class Wanted:
    """One item of the plan: its place, the expected layout of a tensor at that place, and the ranges to be read for it."""

    item: ReadItem
    info: StorageInfo
    stored: StoredTensor | None
    needed: Sequence[ByteRange]

    @property
    def end(self) -> int:
        return self.needed[-1].end

    @property
    def rows(self) -> ByteRange:
        """Where the wanted rows lie in the shard, if the item has the expected layout."""
        if self.stored is None:
            return ByteRange(self.info.offset, 0)
        rows = self.stored.rows(self.item)
        return ByteRange(self.info.offset + len(self.stored.head) + rows.offset, rows.length)


def windows_for(
    wanted: Mapping[str, Sequence[Wanted]], is_remote: Callable[[str], bool], shards: Sequence[str]
) -> list[Window]:
    """The windows that this rank reads, in the order that all ranks keep."""
    windows: list[Window] = []
    for shard, items in wanted.items():
        ranges = [part for item in items for part in item.needed]
        if is_remote(shard):
            windows += windows_of(shard, ranges, CELL_BYTES)
        else:
            windows += windows_of(shard, ranges, LOCAL_WINDOW_BYTES, [item.rows for item in items])
    return in_order(windows, shards)


_HINT_LARGE = (
    "Load or convert it on a host with more memory. Or leave it out: of the state dict, or of an export with --exclude."
)


class ShardItems:
    """The wanted items of one shard, fed from its windows, which arrive in ascending order."""

    def __init__(
        self, shard: str, wanted: Sequence[Wanted], reader: ShardReader, items: ItemReader, planner: LoadPlanner
    ) -> None:
        self._shard = shard
        self._wanted = sorted(wanted, key=lambda one: one.info.offset)
        self._reader = reader
        self._items = items
        self._planner = planner
        self._next = 0
        self._open: list[tuple[Wanted, Feed]] = []

    def place_of(self, window: Window) -> memoryview | None:
        """The target memory for the whole next window, if it is contiguous: the window may be read into it, and then
        taken.
        """
        # Another item begins in the window: its bytes do not belong into this one's tensor.
        is_next = self._next < len(self._wanted) and self._wanted[self._next].info.offset < window.end
        if is_next or len(self._open) != 1:
            return None
        one, feed = self._open[0]
        return feed.memory_of(window.offset - one.info.offset, window.length)

    def take_item(self, window: Window, raw: memoryview) -> None:
        """Feeds the items in one window.

        Raises:
            ObjectCorrupt: intact bytes are not what the metadata describes. StoreError: an item is larger than the
                memory. And any error of the planner.
        """
        try:
            # A hostile .metadata, or an honest large item, may exceed the memory: the error names it.
            self._take(window, raw)
        except MemoryError as exc:
            listed = [one for one, _ in self._open] + self._wanted[max(0, self._next - 1) : self._next]
            largest = max(listed, key=lambda one: one.info.length)
            detail = f"an item of {largest.info.length} bytes does not fit into memory"
            raise StoreError(self._shard, "load", largest.item.storage_index.fqn, detail, _HINT_LARGE) from exc

    def _take(self, window: Window, raw: memoryview) -> None:
        for one, feed in self._open:
            self._feed(one, feed, window, raw)
        self._open = [(one, feed) for one, feed in self._open if one.end > window.end]
        while self._next < len(self._wanted) and self._wanted[self._next].info.offset < window.end:
            one = self._wanted[self._next]
            self._next += 1
            start, length = one.info.offset - window.offset, one.info.length
            # The usual case, small items: no copy, and no state between windows.
            if start >= 0 and start + length <= window.length:
                self._items.read_item(raw[start : start + length], one.item, self._planner, self._shard)
                continue
            feed = Feed(one.item, one.info, one.stored, self._shard, (self._items, self._planner, self._whole(one)))
            self._feed(one, feed, window, raw)
            if one.end > window.end:
                self._open.append((one, feed))

    def finish_shard(self) -> None:
        """Called after the last window: feeds items without bytes."""
        for one in self._wanted[self._next :]:
            self._items.read_item(memoryview(b""), one.item, self._planner, self._shard)

    def _feed(self, one: Wanted, feed: Feed, window: Window, raw: memoryview) -> None:
        start, end = max(one.info.offset, window.offset), min(one.end, window.end)
        if start < end:
            feed.take_piece(raw[start - window.offset : end - window.offset], start - one.info.offset)
        if one.end <= window.end:
            feed.finish_feed()

    def _whole(self, one: Wanted) -> Callable[[], memoryview]:
        """Reads all of an item of which only a part was wanted, into memory of its own, because the window is still in
        use.
        """

        def read() -> memoryview:
            # A sibling: the reader's own buffer holds the window that is being fed.
            with closing(self._reader.sibling()) as reader:
                return reader.read_range(self._shard, one.info.offset, one.info.length)

        return read


class Loading:
    """Reads the windows of one rank: local ones when needed, remote ones ahead, shared ones from the rank that fetches."""

    def __init__(self, reader: ShardReader, is_remote: Callable[[str], bool], exchange: Exchange | None) -> None:
        self._reader = reader
        self._is_remote = is_remote
        self._exchange = exchange

    def run(self, windows: Sequence[Window], shards: Sequence[str], feed: FeedWindow, place_of: PlaceOf) -> None:
        """Passes each window, verified, to `feed`, in order. Its memory is valid during the call.

        A window of the node's own disk is read into its `place_of`, if there is one. If it fails its check, that memory
        becomes zeros.

        Raises:
            ShardLost: no intact copy is left. And any error of `feed`. When it raises, no thread is left that the load
                waits for.
        """
        ahead, read = self._ahead(windows, shards), self._reader.read_range
        try:
            for cell, group in groupby(windows, key=lambda window: window.cell):
                unit = self._unit(cell)
                if unit is not None:
                    self._read_shared(list(group), unit, ahead, feed)
                    continue
                is_remote = self._is_remote(cell[0])
                for window in group:
                    if is_remote:
                        feed(window, ahead.take_window(window))
                        ahead.release(window)
                    else:
                        feed(window, read(window.shard, window.offset, window.length, place_of(window)))
                    # Long work on local windows is not silence: the other ranks must not give this one up.
                    self._pulse()
        except BaseException:
            if self._exchange is not None:
                # The other ranks of the node must not wait for cells that will not come.
                self._exchange.leave()
            raise
        finally:
            ahead.stop()
        if self._exchange is not None:
            self._exchange.leave()
            # The cache's file goes when every rank that shares it has opened it: too early, and a late rank finds none.
            self._exchange.wait_until_opened()

    def _pulse(self) -> None:
        if self._exchange is not None:
            self._exchange.pulse()

    def _unit(self, cell: tuple[str, int]) -> Unit | None:
        return None if self._exchange is None else self._exchange.unit_of(cell)

    def _ahead(self, windows: Sequence[Window], shards: Sequence[str]) -> FetchAhead:
        tasks: list[Window] = []
        numbers: dict[Window, int] = {}
        for cell, group in groupby(windows, key=lambda window: window.cell):
            unit = self._unit(cell)
            if self._exchange is None or unit is None:
                tasks += group if self._is_remote(cell[0]) else []
            elif self._exchange.is_own(unit):
                tasks.append(unit.window)
                numbers[unit.window] = self._exchange.number_of(unit)
        return FetchAhead(self._reader, in_order(tasks, shards), numbers, self._exchange)

    def _read_shared(self, windows: Sequence[Window], unit: Unit, ahead: FetchAhead, feed: FeedWindow) -> None:
        """Feeds windows that several ranks of the node need, from the rank that fetched them. If that fails, reads them
        again.
        """
        exchange, hull = self._exchange, unit.window
        assert exchange is not None
        is_own = exchange.is_own(unit)
        raw = _take_fetched(hull, windows, ahead) if is_own else exchange.take_piece(unit)
        for window in windows:
            # The rank that fetches has failed or hangs: each reads for itself, from any copy that is left.
            if raw is None:
                feed(window, self._reader.read_range(window.shard, window.offset, window.length))
            else:
                self._reader.findings.traffic.bytes_shared += 0 if is_own else window.length
                feed(window, raw[window.offset - hull.offset : window.end - hull.offset])
            self._pulse()
        # Only now: the slot's memory was in use until here.
        if is_own:
            exchange.release(unit)


def _take_fetched(hull: Window, windows: Sequence[Window], ahead: FetchAhead) -> memoryview | None:
    """A window that this rank has fetched for several ranks. None: a block of it is lost, perhaps one that no rank
    needs.
    """
    try:
        return ahead.take_window(hull)
    except ShardLost:
        # This rank needs every block of it: none is left to try.
        if {block for window in windows for block in window.blocks}.issuperset(hull.blocks):
            raise
        return None
