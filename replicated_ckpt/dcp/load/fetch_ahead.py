"""Fetching ahead: a few threads fetch windows from other nodes while the rank works on earlier ones."""

import threading
import time
from collections.abc import Mapping, Sequence

from replicated_ckpt.core.reading.windows import CELL_BYTES, Window
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.node_cache.exchange import Exchange
from replicated_ckpt.stores.threads import start_worker

THREADS = 3
BUFFERS = 5
"""Of 4 MiB each: fetched, or being fetched, and not used yet."""
_PULSE_S = 0.5
STOP_WITHIN_S = 1.0


class FetchAhead:
    """Fetches windows in their order. Windows that the node's other ranks need, too, go through this rank's cache.

    It owns its threads, and one thread uses it. Each window is taken once, in order.
    """

    def __init__(
        self, reader: ShardReader, windows: Sequence[Window], numbers: Mapping[Window, int], exchange: Exchange | None
    ) -> None:
        """`numbers`: which of `windows` are pieces of the cache, and their numbers there."""
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
        # A thread less, as at a process limit, must not leave those before it running.
        except BaseException:
            self.stop()
            raise

    def take_window(self, window: Window) -> memoryview:
        """The window's verified bytes, valid until `release`. Raises the error of its fetch."""
        with self._changed:
            while window not in self._results:
                if self._failure is not None:
                    raise self._failure
                # The other ranks must see that this one lives while it waits: they would give its cache up.
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
            # Allocated at the first task: a rank that fetches nothing needs no 20 MiB.
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
            self._tell(window, self._read(reader, window, memory))
            return
        number = self._numbers[window]
        # Other ranks may still read the slot's earlier window.
        if not self._exchange.wait_for_slot(number, lambda: self._is_stopped):
            return
        found = self._read(reader, window, self._exchange.slot(number))
        # Also on failure: ranks that wait for this number learn of it, and read for themselves.
        given = self._exchange.put_piece(number, found if isinstance(found, memoryview) else None)
        self._tell(window, given if isinstance(found, memoryview) else found)

    def _tell(self, window: Window, found: memoryview | BaseException) -> None:
        with self._changed:
            self._results[window] = found
            self._changed.notify_all()

    def _read(self, reader: ShardReader, window: Window, memory: memoryview | None) -> memoryview | BaseException:
        with self._changed:
            self._reads_under_way += 1
        try:
            return reader.read_range(window.shard, window.offset, window.length, memory)
        # Kept for its window: those before it may be all that the rank still gets.
        except ReplicatedCkptError as exc:
            return exc
        finally:
            with self._changed:
                self._reads_under_way -= 1
