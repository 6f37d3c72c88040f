"""The tee: one pass over a shard's bytes, to the node's own disk and to the peers at once, checksummed on the way.

Small writes are copied into a few page-aligned buffers; large ones are only referenced. The tee hashes each full piece
once and queues it for every sink's thread. The last thread to finish a piece frees its buffer. So memory is bounded, small
writes are cheap, tensors are not copied, and the sinks work in parallel.
"""

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from replicated_ckpt.core.integrity.checksum import BlockHasher, BlockTable, Bytes
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.threads import start_thread

BUFFER_BYTES = 4 << 20
BUFFERS = 4
REFERRED_BYTES_MIN = 64 << 10
"""Smaller data is copied: that costs less than a separate piece in every system call."""


class Sink(Protocol):
    """One destination of a shard. All methods of one sink are called from one thread, `write` in order.

    `label` names the destination in reports. After an error nothing but `discard` is called.
    """

    @property
    def label(self) -> str: ...

    def write(self, *pieces: memoryview) -> None:
        """Writes the next bytes, in one or several pieces; must not keep a reference to them after it returns."""

    def finish(self, table: BlockTable) -> None:
        """Called after the last byte. When it returns, the shard is at the promised level (durable, or in memory)."""

    def discard(self) -> None:
        """Aborts; no byte of the shard counts at the destination afterwards. Never raises a StoreError."""


class Buffers:
    """Page-aligned memory, reused from shard to shard. Holds `count * size_bytes` for its lifetime."""

    def __init__(self, count: int = BUFFERS, size_bytes: int = BUFFER_BYTES) -> None:
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(count):
            self.free.put(memoryview(mmap.mmap(-1, size_bytes)))


@dataclass
class _Piece:
    """Consecutive bytes of a shard, wherever they lie in memory. `buffer` holds the copied ones. `users` sinks need it."""

    buffer: memoryview
    views: tuple[memoryview, ...]
    users: int


class _SinkThread(threading.Thread):
    """Owns one sink. After an error it still accepts pieces, so that the other sinks never wait for it."""

    def __init__(self, sink: Sink, tee: "Tee") -> None:
        super().__init__(name=f"rckpt-sink-{sink.label}", daemon=True)
        self.sink = sink
        self.pieces: queue.SimpleQueue[_Piece | BlockTable | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.write_s = self.finish_s = 0.0
        self.began_s = self.written_s = self.ended_s = 0.0
        self._tee = tee

    def run(self) -> None:
        while True:
            piece = self.pieces.get()
            if not isinstance(piece, _Piece):
                # A table or None ends the queue, also after an error: `join` waits for this thread.
                break
            self.began_s = self.began_s or time.monotonic()
            if self.error is None:
                self.write_s += self._guard(partial(self.sink.write, *piece.views))
                self.written_s = time.monotonic()
            # Also after an error: a buffer that is not released would block the writer for ever.
            self._tee.release(piece)
        if self.error is None and piece is not None:
            self.finish_s = self._guard(partial(self.sink.finish, piece))
        self.ended_s = time.monotonic()
        # `finish` itself may have failed: its incomplete copy must go, too.
        if self.error is not None or piece is None:
            self.sink.discard()
        del self._tee  # a reference circle would keep the buffers until the garbage collector runs

    def _guard(self, action: Callable[[], object]) -> float:
        """Runs the action, and records its error; returns the seconds that it took."""
        began = time.monotonic()
        try:
            action()
        except BaseException as exc:  # noqa: BLE001 - top of a thread; `Tee` hands it to the owner of the sink
            self.error = exc
        return time.monotonic() - began


@dataclass(frozen=True)
class Outcome:
    """The result of one sink. `error` is None if the sink finished. `write_s` and `finish_s` are seconds in these calls.

    By the monotonic clock, the first write began at `began_s`, the last one ended at `written_s`, and all at `ended_s`.
    """

    error: BaseException | None
    write_s: float = 0.0
    finish_s: float = 0.0
    began_s: float = 0.0
    written_s: float = 0.0
    ended_s: float = 0.0


class Tee:
    """Writes one shard to several sinks in one pass. Used by one thread; `finish` or `discard` must be called.

    With `copies` all bytes pass through the buffers, so that each sink gets whole pages of aligned memory, as direct I/O
    needs. A failing sink never stops the others. If the first sink fails, its error is raised at the next full piece.
    `waited_s` is the time, in seconds, that `write` waited for a free buffer, and so for the slowest sink.
    """

    def __init__(self, sinks: Sequence[Sink], buffers: Buffers, *, copies: bool = False) -> None:
        """Raises StoreUnavailable: the system has no thread for one of the sinks; the shard is aborted at all of them."""
        self._buffers = buffers
        self._copies = copies
        self._lock = threading.Lock()
        self._hasher = BlockHasher()
        self._is_hashed = False
        self._buffer: memoryview | None = None
        self._views: list[memoryview] = []
        self._listed = self._filled = self._size = 0
        self.position = 0
        self.waited_s = 0.0
        self._threads: list[_SinkThread] = []
        for sink in sinks:
            thread = _SinkThread(sink, self)
            try:
                start_thread(thread)
            except StoreUnavailable:
                self.discard()
                # Sinks without a thread are not in `join`, and would keep their files and connections.
                for other in sinks[len(self._threads) :]:
                    other.discard()
                raise
            self._threads.append(thread)

    def write(self, data: Bytes) -> int:
        """Appends a copy of `data` (any contiguous bytes-like object) to the shard; returns its size in bytes."""
        view = memoryview(data).cast("B")
        size = len(view)
        if self._buffer is not None and self._size + size < len(self._buffer):  # the fast path, for many small writes
            end = self._filled + size
            self._buffer[self._filled : end] = view
            self._filled = end
            self._size += size
            self.position += size
            return size
        while view:
            room = self._room()
            count = min(len(view), len(room))
            room[:count] = view[:count]
            self._advance(count)
            view = view[count:]
        return size

    def fill(self, size_bytes: int, read: Callable[[memoryview], object]) -> None:
        """Appends `size_bytes` bytes: `read` is called for one part of a buffer after the other, and fills it."""
        while size_bytes:
            room = self._room()[:size_bytes]
            read(room)
            self._advance(len(room))
            size_bytes -= len(room)

    def refer(self, data: memoryview) -> None:
        """Appends bytes without a copy where that pays. They must not change until `finish` or `discard` returns."""
        if self._copies or len(data) < REFERRED_BYTES_MIN:
            self.write(data)
            return
        while data:
            # A reference uses up its share of a buffer, too: this bounds the bytes in flight to the sinks.
            part = data[: len(self._room())]
            self._list_gathered()
            self._views.append(part)
            self._grow(len(part))
            data = data[len(part) :]

    def _room(self) -> memoryview:
        """The place for the next copied bytes, at least one byte. Waits for a free buffer."""
        if self._buffer is None:
            began = time.perf_counter()
            self._buffer = self._buffers.free.get()
            self.waited_s += time.perf_counter() - began
        return self._buffer[self._filled : self._filled + len(self._buffer) - self._size]

    def _advance(self, count: int) -> None:
        self._filled += count
        self._grow(count)

    def _grow(self, count: int) -> None:
        self._size += count
        self.position += count
        if self._buffer is not None and self._size == len(self._buffer):
            self._dispatch()

    def _list_gathered(self) -> None:
        """Turns the bytes that were copied since the last view into a view, to keep the order of copies and references."""
        if self._buffer is not None and self._filled > self._listed:
            self._views.append(self._buffer[self._listed : self._filled])
            self._listed = self._filled

    def _hash_listed(self) -> None:
        self._list_gathered()
        # The footer holds the checksums, which do not cover the footer itself.
        if not self._is_hashed:
            for view in self._views:
                self._hasher.update(view)

    def _dispatch(self) -> None:
        if self._buffer is None:
            return
        self._hash_listed()
        views = (self._buffer[: self._filled],) if self._copies else tuple(self._views)
        piece = _Piece(self._buffer, views, len(self._threads))
        self._buffer = None
        self._views = []
        self._listed = self._filled = self._size = 0
        for thread in self._threads:
            thread.pieces.put(piece)
        # Without the first sink, the node's own copy, the save cannot succeed: end it early.
        first_error = self._threads[0].error
        if first_error is not None:
            raise first_error

    def release(self, piece: _Piece) -> None:
        """Called by each sink's thread after it has written a piece, or skipped it after an error."""
        with self._lock:
            piece.users -= 1
            done = piece.users == 0
        if done:
            self._buffers.free.put(piece.buffer)

    def finish(self) -> tuple[BlockTable, tuple[Outcome, ...]]:
        """Appends the footer, waits for every sink, and returns the table and the outcome of each sink."""
        table = self.end()
        return table, self.join()

    def end(self) -> BlockTable:
        """Appends the footer, and does not wait: `join` must be called. Another shard may be written meanwhile."""
        self._hash_listed()
        self._is_hashed = True
        table = self._hasher.table()
        self.write(table.encode())
        self._dispatch()
        self._end_sinks(table)
        return table

    def discard(self) -> None:
        """Aborts the shard at every sink. May be called after an error at any point; never raises."""
        if self._buffer is not None:
            self._buffers.free.put(self._buffer)
            self._buffer = None
        self._end_sinks(None)
        self.join()

    def _end_sinks(self, last: BlockTable | None) -> None:
        for thread in self._threads:
            thread.pieces.put(last)

    def join(self) -> tuple[Outcome, ...]:
        """Waits for every sink, and returns the outcome of each."""
        for thread in self._threads:
            thread.join()
        return tuple(
            Outcome(one.error, one.write_s, one.finish_s, one.began_s, one.written_s, one.ended_s)
            for one in self._threads
        )
