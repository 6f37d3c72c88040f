"""Copies to a GPU through pinned memory: two small buffers, one filled while the other is being copied."""

import ctypes
import threading

import torch

from replicated_ckpt.dcp.tensors.memory import copy_into, memory_of
from replicated_ckpt.stores.files.direct import address_of

BUFFER_BYTES = 4 << 20
_BUFFERS = 2


class PinnedRing:
    """Pinned buffers of one GPU and the stream that empties them. One thread."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_BUFFERS)
        ]
        self._memory = [memory_of(buffer) for buffer in self._buffers]
        self._events = [torch.cuda.Event() for _ in range(_BUFFERS)]  # type: ignore[no-untyped-call]
        self._next = 0
        self._target: torch.Tensor | None = None
        self._start = self._filled = 0

    def room_for(self, target: torch.Tensor, position: int, length_min: int) -> memoryview:
        """Memory for the bytes of `target` from `position` on: for `length_min` of them at least, or a whole buffer.

        Earlier bytes are sent first, unless they lie right before these and the buffer has room behind them.
        """
        is_next = target is self._target and position == self._start + self._filled
        if not is_next or min(length_min, BUFFER_BYTES) > BUFFER_BYTES - self._filled:
            self.flush()
            # The copy from this buffer may still be under way: filled now, it would send the new bytes.
            self._events[self._next].synchronize()
            self._target, self._start = target, position
        return self._memory[self._next][self._filled :]

    def record_size(self, count: int) -> None:
        """Counts bytes of that memory as filled."""
        self._filled += count

    def flush(self) -> None:
        """Begins the copy of all bytes that were filled so far."""
        if self._target is not None and self._filled:
            buffer, event = self._buffers[self._next], self._events[self._next]
            with torch.cuda.stream(self.stream):
                target = self._target[self._start : self._start + self._filled]
                copy_into(target, buffer[: self._filled], non_blocking=True)
                event.record(self.stream)
            # The allocator must not reuse the target's memory before this stream is done with it.
            target.record_stream(self.stream)
            self._next = (self._next + 1) % _BUFFERS
        self._target, self._filled = None, 0


_of_thread = threading.local()


def _ring_of(device: torch.device) -> PinnedRing:
    """This thread's ring: two threads that load at once have buffers of their own."""
    rings: dict[torch.device, PinnedRing] = _of_thread.__dict__.setdefault("rings", {})
    if device not in rings:
        rings[device] = PinnedRing(device)
    return rings[device]


class PinnedCopies:
    """A contiguous target on a GPU. Later work of the GPU's current stream runs after the copies."""

    def __init__(self, target: torch.Tensor) -> None:
        self._bytes = target.reshape(-1).view(torch.uint8)
        self._ring = _ring_of(target.device)
        # The target may still be written by earlier work, as by its initialisation.
        self._ring.stream.wait_stream(torch.cuda.current_stream(target.device))
        self._position = 0

    def place(self, start: int, length: int) -> memoryview | None:
        """A place in the buffer that is copied next, if it has room for them."""
        if start != self._position or length > BUFFER_BYTES:
            return None
        return self._ring.room_for(self._bytes, start, length)[:length]

    def put(self, piece: memoryview) -> None:
        while piece:
            room = self._ring.room_for(self._bytes, self._position, len(piece))
            count = min(len(piece), len(room))
            if address_of(piece) != address_of(room):
                ctypes.memmove(address_of(room), address_of(piece), count)
            self._ring.record_size(count)
            self._position += count
            piece = piece[count:]

    def close(self) -> None:
        self._ring.flush()
        torch.cuda.current_stream(self._bytes.device).wait_stream(self._ring.stream)
