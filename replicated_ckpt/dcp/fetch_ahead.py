"""Fetching ahead: a few threads bring the windows that lie on other nodes while the rank works on those before them."""

import threading
from collections.abc import Mapping, Sequence

from replicated_ckpt.core.windows import CELL_BYTES, Window
from replicated_ckpt.dcp.shard_reader import ShardReader
from replicated_ckpt.dcp.sharing import OwnUnits

THREADS = 3
BUFFERS = 5
"""Of 4 MiB each: fetched, or being fetched, and not used yet."""
_PULSE_S = 0.5
_STOP_WITHIN_S = 10.0


class FetchAhead:
    """Fetches windows in their order. What the node's other ranks need too goes through this rank's spool.

    One thread uses it; it owns the threads. Each window is taken once, in order.
    """

    def __init__(
        self, reader: ShardReader, windows: Sequence[Window], units: Mapping[Window, int], own_units: OwnUnits | None
    ) -> None:
        """`units`: which of `windows` are pieces of the spool, and their numbers there."""
        self._reader = reader
        self._windows = list(windows)
        self._units = units
        self._own_units = own_units
        self._next = 0
        self._changed = threading.Condition()
        self._buffers: list[memoryview] | None = None
        self._lent: dict[Window, memoryview] = {}
        self._results: dict[Window, memoryview | BaseException] = {}
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._work, name="replicated_ckpt-fetch", daemon=True)
            for _ in range(min(THREADS, len(windows)))
        ]
        for thread in self._threads:
            thread.start()

    def take(self, window: Window) -> memoryview:
        """The window's bytes, verified; valid until `done`. Raises what went wrong with it."""
        with self._changed:
            while window not in self._results:
                self._changed.wait(_PULSE_S)
                if self._own_units is not None:
                    self._own_units.pulse()
            found = self._results.pop(window)
        if isinstance(found, BaseException):
            raise found
        return found

    def done(self, window: Window) -> None:
        """The bytes of a taken window are needed no more."""
        with self._changed:
            memory = self._lent.pop(window, None)
            if memory is not None and self._buffers is not None:
                self._buffers.append(memory)
            self._changed.notify_all()

    def stop(self) -> None:
        """No more is fetched. A thread that waits for a node goes when that answers, or its time is up."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_STOP_WITHIN_S)

    def _work(self) -> None:
        reader = self._reader.sibling()
        try:
            while (task := self._next_task()) is not None:
                window, memory = task
                try:
                    found: memoryview | BaseException = self._fetched(reader, window, memory)
                except Exception as exc:  # noqa: BLE001 - raised by the thread that takes the window
                    found = exc
                with self._changed:
                    self._results[window] = found
                    self._changed.notify_all()
        finally:
            reader.close()

    def _next_task(self) -> tuple[Window, memoryview | None] | None:
        """The next window, with memory for it unless it goes into the spool. Memory goes to the earlier window first."""
        with self._changed:
            if self._buffers is None:
                self._buffers = [memoryview(bytearray(CELL_BYTES)) for _ in range(BUFFERS)]
            while not self._is_stopped and self._next < len(self._windows):
                window = self._windows[self._next]
                if window in self._units or self._buffers:
                    self._next += 1
                    if window in self._units:
                        return window, None
                    self._lent[window] = self._buffers.pop()
                    return window, self._lent[window]
                self._changed.wait()
        return None

    def _fetched(self, reader: ShardReader, window: Window, memory: memoryview | None) -> memoryview:
        if self._own_units is None or window not in self._units:
            return reader.read(window.shard, window.offset, window.length, memory)
        return self._own_units.fetched(self._units[window], window, reader, lambda: self._is_stopped)
