"""The layout of a shard: which bytes lie where in the staged copy, and which bytes are not in it. No byte is moved."""

import contextlib
import io
import os
from collections.abc import Iterator

from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.files.direct import address_of
from replicated_ckpt.stores.tee import REFERRED_BYTES_MIN

STAGED, BETWEEN = 0, 1
"""Numbers of the descriptors: the segment with the staged storages, and what surrounds them in the shard."""
BETWEEN_BYTES_MAX = 256 << 20
"""Of objects, and of what a planner has made anew: more is written by the rank itself, which holds less of it at once."""


class TooMuchElsewhere(ReplicatedCkptError):
    """Too much of a shard lies outside of the staged copy, so the shard cannot be submitted."""

    default_hint = "The rank writes the shard itself. No action is needed."


class ShardLayout:
    """A stream for items that records where their bytes lie, instead of writing them. `close` it.

    Bytes in `memory` are recorded by their place. All other bytes, and small items, are copied to the descriptor
    `between`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._begin = address_of(memory)
        self._end = self._begin + len(memory)
        with _taking_memory():
            self.between = os.memfd_create("replicated-ckpt-between", os.MFD_CLOEXEC)
        self._file = io.BufferedWriter(io.FileIO(self.between, "wb"), 1 << 20)
        self._copied = 0
        self.position = 0
        self.pieces: list[tuple[int, int, int]] = []

    def write(self, data: memoryview) -> int:
        """Appends a copy."""
        if self._copied + len(data) > BETWEEN_BYTES_MAX:
            raise TooMuchElsewhere(f"More than {BETWEEN_BYTES_MAX} bytes of a shard lie outside of the staged copy.")
        with _taking_memory():
            self._file.write(data)
        self._append(BETWEEN, self._copied, len(data))
        self._copied += len(data)
        return len(data)

    def refer(self, data: memoryview) -> None:
        """Appends bytes by their place. They must not change until the shard is written."""
        # A piece of its own costs more than the copy of a small item; read-only memory is not the staged copy's.
        if len(data) < REFERRED_BYTES_MIN or data.readonly:
            self.write(data)
            return
        begin = address_of(data)
        if self._begin <= begin and begin + len(data) <= self._end:
            self._append(STAGED, begin - self._begin, len(data))
        else:
            self.write(data)

    def _append(self, source: int, offset: int, size: int) -> None:
        self.position += size
        if self.pieces:
            last, begin, before = self.pieces[-1]
            # Neighbours become one piece: those of a million items would not fit into one message.
            if last == source and begin + before == offset:
                self.pieces[-1] = source, begin, before + size
                return
        if size:
            self.pieces.append((source, offset, size))

    def finish_layout(self) -> None:
        """Called after the last append: writes the copied bytes to the descriptor."""
        with _taking_memory():
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what could not be written, once more
            self._file.close()


@contextlib.contextmanager
def _taking_memory() -> Iterator[None]:
    """Raises StoreUnavailable: the system has no memory left."""
    try:
        yield
    except OSError as exc:
        raise StoreUnavailable(
            "this rank's memory", "lay out the shard in", "", f"{type(exc).__name__}: {exc}"
        ) from exc
