"""The tee: one pass over a shard's bytes, to the own disk and to the peers at once, checksummed on the way.

Bytes are gathered in a few page-aligned buffers; each full buffer is hashed once and handed to every sink's thread, and
is reused when the last of them is done with it. So memory is bounded, small writes cost little, and the sinks overlap.
"""

import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from replicated_ckpt.core.checksum import BlockHasher, BlockTable, Bytes

BUFFER_BYTES = 4 << 20
BUFFERS = 4


class Sink(Protocol):
    """One destination of a shard. All methods of one sink are called from one thread, `write` in order.

    `label` names the destination in reports. After an error nothing but `discard` is called.
    """

    @property
    def label(self) -> str: ...

    def write(self, piece: memoryview) -> None:
        """Takes the next bytes; may not keep `piece` after it returns."""

    def finish(self, table: BlockTable) -> None:
        """Everything was written: holds at the promised level (durable, or in memory) when this returns."""

    def discard(self) -> None:
        """Gives up; nothing of the shard counts at the destination afterwards. Never raises a StoreError."""


class Buffers:
    """Page-aligned memory, reused from shard to shard. Holds `count * size_bytes` for its lifetime."""

    def __init__(self, count: int = BUFFERS, size_bytes: int = BUFFER_BYTES) -> None:
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(count):
            self.free.put(memoryview(mmap.mmap(-1, size_bytes)))


@dataclass
class _Piece:
    buffer: memoryview
    filled: int
    users: int


class _SinkThread(threading.Thread):
    """Owns one sink. Goes on taking pieces after an error, so that the other sinks never wait for a dead one."""

    def __init__(self, sink: Sink, tee: "Tee") -> None:
        super().__init__(name=f"rckpt-sink-{sink.label}", daemon=True)
        self.sink = sink
        self.pieces: queue.SimpleQueue[_Piece | BlockTable | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._tee = tee

    def run(self) -> None:
        while True:
            piece = self.pieces.get()
            if not isinstance(piece, _Piece):
                break
            if self.error is None:
                self._guarded(partial(self.sink.write, piece.buffer[: piece.filled]))
            self._tee.release(piece)
        if self.error is None and piece is not None:
            self._guarded(partial(self.sink.finish, piece))
        if self.error is not None or piece is None:
            self.sink.discard()

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - top of a thread; `Tee` hands it to the owner of the sink
            self.error = exc


@dataclass(frozen=True)
class Outcome:
    """What became of one sink: `error` is None if it finished."""

    sink: Sink
    error: Exception | None


class Tee:
    """Writes one shard to several sinks in one pass. Used by one thread; `finish` or `discard` must be called.

    A failing sink never stops the others. If the first sink fails, `write` raises its error at the next full buffer.
    """

    def __init__(self, sinks: Sequence[Sink], buffers: Buffers) -> None:
        self._buffers = buffers
        self._lock = threading.Lock()
        self._hasher = BlockHasher()
        self._buffer: memoryview | None = None
        self._filled = 0
        self.position = 0
        self._threads = [_SinkThread(sink, self) for sink in sinks]
        for thread in self._threads:
            thread.start()

    def write(self, data: Bytes) -> int:
        """Appends `data` (any contiguous bytes-like object) to the shard; returns its size in bytes."""
        view = memoryview(data).cast("B")
        size = len(view)
        while len(view):
            buffer = self._buffer
            if buffer is None:
                buffer = self._buffer = self._buffers.free.get()
            part = view[: len(buffer) - self._filled]
            buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == len(buffer):
                self._dispatch(hashed=True)
        self.position += size
        return size

    def _dispatch(self, *, hashed: bool) -> None:
        buffer, filled = self._buffer, self._filled
        if buffer is None:
            return
        self._buffer, self._filled = None, 0
        if hashed:
            self._hasher.update(buffer[:filled])
        piece = _Piece(buffer, filled, len(self._threads))
        for thread in self._threads:
            thread.pieces.put(piece)
        first_error = self._threads[0].error
        if first_error is not None:
            raise first_error

    def release(self, piece: _Piece) -> None:
        """Called by each sink's thread when it is done with a piece."""
        with self._lock:
            piece.users -= 1
            done = piece.users == 0
        if done:
            self._buffers.free.put(piece.buffer)

    def finish(self) -> tuple[BlockTable, tuple[Outcome, ...]]:
        """Appends the footer, waits for every sink, and says what became of each."""
        self._dispatch(hashed=True)
        table = self._hasher.table()
        self._append_footer(table.encoded())
        return table, self._joined(table)

    def _append_footer(self, footer: bytes) -> None:
        view = memoryview(footer)
        while view:
            buffer = self._buffer = self._buffers.free.get()
            part = view[: len(buffer)]
            buffer[: len(part)] = part
            self._filled = len(part)
            view = view[len(part) :]
            self._dispatch(hashed=False)

    def discard(self) -> None:
        """Gives the shard up at every sink. May be called after an error at any point; never raises."""
        if self._buffer is not None:
            self._buffers.free.put(self._buffer)
            self._buffer = None
        self._joined(None)

    def _joined(self, last: BlockTable | None) -> tuple[Outcome, ...]:
        for thread in self._threads:
            thread.pieces.put(last)
        for thread in self._threads:
            thread.join()
        return tuple(Outcome(thread.sink, thread.error) for thread in self._threads)
