"""One rank's loading: its windows in order, fetched ahead from other nodes, and the items in them."""

import threading
import time
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
from replicated_ckpt.dcp.load.item_reader import Feed, ItemReader
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensor
from replicated_ckpt.errors import ReplicatedCkptError, ShardLost, StoreError
from replicated_ckpt.stores.node_cache.exchange import Exchange
from replicated_ckpt.stores.threads import start_worker

THREADS = 3
BUFFERS = 5
"""Buffers of 4 MiB. Each has one window, which is being fetched or waits to be used."""
_PULSE_S = 0.5
STOP_WITHIN_S = 1.0


class FetchAhead:
    """Fetches windows in their order, on threads of its own. Windows that other ranks of the node need, too, go through
    this rank's cache.

    One thread takes the windows, each once and in order.
    """

    def __init__(
        self, reader: ShardReader, windows: Sequence[Window], numbers: Mapping[Window, int], exchange: Exchange | None
    ) -> None:
        """`numbers`: the number in the cache of each window that goes through it."""
        self._reader = reader
        self._windows = list(windows)
        self._numbers = numbers
        self._exchange = exchange
        self._next = 0
        self._changed = threading.Condition()
        self._buffers: list[memoryview] | None = None
        self._lent: dict[Window, memoryview] = {}
        self._results: dict[Window, memoryview | BaseException] = {}
        self._reads_under_way = 0
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(min(THREADS, len(windows))):
                self._threads.append(start_worker(self._work, name="replicated_ckpt-fetch"))
        # If a thread cannot start, as at a process limit, those that already run must end.
        except BaseException:
            self.stop()
            raise

    def take_window(self, window: Window) -> memoryview:
        """The window's verified bytes, valid until `release`. Raises the error of its fetch."""
        with self._changed:
            while window not in self._results:
                if self._failure is not None:
                    raise self._failure
                # While this rank waits, the others must see that it lives. Otherwise they stop using its cache.
                if self._exchange is not None and self._reads_under_way:
                    self._exchange.pulse()
                self._changed.wait(_PULSE_S)
            found = self._results.pop(window)
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, window: Window) -> None:
        """Frees the memory of a taken window for another window."""
        with self._changed:
            memory = self._lent.pop(window, None)
            if memory is not None and self._buffers is not None:
                self._buffers.append(memory)
            self._changed.notify_all()

    def stop(self) -> None:
        """Stops fetching. A thread that waits for a node ends when the node answers, or when its time-out passes."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        # Bounded: a thread may hang in a peer's time-out, and the load's error must not wait for that.
        until = time.monotonic() + STOP_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        # A source is used by one thread at a time: each thread has connections of its own.
        reader = self._reader.sibling()
        try:
            while (task := self._next_task()) is not None:
                self._fetch(reader, *task)
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that takes the windows
            with self._changed:
                self._failure = exc
                self._changed.notify_all()
        finally:
            reader.close()

    def _next_task(self) -> tuple[Window, memoryview | None] | None:
        """The next window, with memory for it unless it goes into the cache. The earliest window gets memory first."""
        with self._changed:
            # Allocated at the first task, so that a rank that fetches nothing does not take 20 MiB.
            if self._buffers is None:
                self._buffers = [memoryview(bytearray(CELL_BYTES)) for _ in range(BUFFERS)]
            while not self._is_stopped and self._next < len(self._windows):
                # Never skip ahead to a later window: the reader waits for the earliest, and would starve.
                window = self._windows[self._next]
                if window in self._numbers or self._buffers:
                    self._next += 1
                    if window in self._numbers:
                        return window, None
                    self._lent[window] = self._buffers.pop()
                    return window, self._lent[window]
                self._changed.wait()
        return None

    def _fetch(self, reader: ShardReader, window: Window, memory: memoryview | None) -> None:
        if self._exchange is None or window not in self._numbers:
            self._put_result(window, self._read(reader, window, memory))
            return
        number = self._numbers[window]
        # Other ranks may still read the slot's earlier window.
        if not self._exchange.wait_for_slot(number, lambda: self._is_stopped):
            return
        found = self._read(reader, window, self._exchange.slot(number))
        # On failure, too: the ranks that wait for this window then read it themselves.
        given = self._exchange.put_piece(number, found if isinstance(found, memoryview) else None)
        self._put_result(window, given if isinstance(found, memoryview) else found)

    def _put_result(self, window: Window, found: memoryview | BaseException) -> None:
        with self._changed:
            self._results[window] = found
            self._changed.notify_all()

    def _read(self, reader: ShardReader, window: Window, memory: memoryview | None) -> memoryview | BaseException:
        with self._changed:
            self._reads_under_way += 1
        try:
            return reader.read_range(window.shard, window.offset, window.length, memory)
        # Raised only when this window is taken: the rank can still use the windows before it.
        except ReplicatedCkptError as exc:
            return exc
        finally:
            with self._changed:
                self._reads_under_way -= 1


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
        """The part of a target tensor that the next window fills, so that the window can be read into it. None: there is
        none, and any memory will do.
        """
        # Another item begins in the window, and its bytes do not belong in this item's tensor.
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
        """A function that reads the whole item, although only a part was wanted. It uses memory of its own, because the
        window is still in use.
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

        A window of the node's own disk is read into its `place_of`, if there is one. If the window fails its check, that
        memory becomes zeros.

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
                    # During long work on local windows, too: the other ranks must not take this one for dead.
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
            # The cache's file may be removed only after every rank that shares the cache has opened it.
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
        """Feeds windows that several ranks of the node need, from the rank that fetched them. If that rank failed, reads
        them itself.
        """
        exchange, hull = self._exchange, unit.window
        assert exchange is not None
        is_own = exchange.is_own(unit)
        raw = _take_fetched(hull, windows, ahead) if is_own else exchange.take_piece(unit)
        for window in windows:
            # The rank that fetches failed or hangs: this rank reads from any copy that is left.
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
    """A window that this rank has fetched for several ranks. None: the window has a lost block, which this rank may not
    need.
    """
    try:
        return ahead.take_window(hull)
    except ShardLost:
        # This rank needs every block of the window, so the load fails.
        if {block for window in windows for block in window.blocks}.issuperset(hull.blocks):
            raise
        return None
