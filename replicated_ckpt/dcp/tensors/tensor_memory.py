"""A tensor's memory as bytes, without numpy, which torch does not need. And copies of it between a GPU and the host."""

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from replicated_ckpt.stores.files.direct import address_of

_MAPPED_BYTES_MIN = 1 << 20
_NUMBERS_BY_NAME = {  # torch removes these types one by one
    "qint8": torch.int8,
    "quint8": torch.uint8,
    "qint32": torch.int32,
    "quint4x2": torch.uint8,
    "quint2x4": torch.uint8,
}
_NUMBERS = {getattr(torch, name): numbers for name, numbers in _NUMBERS_BY_NAME.items() if hasattr(torch, name)}
"""torch crashes when it uses tensors of these types that have no scale. Here they are viewed as integers."""


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor on the CPU with undefined values. The caller fills it; one with a `stride` is never touched.

    Under `use_deterministic_algorithms`, torch fills the memory of `torch.empty`, so all of it would be allocated.
    """
    numbers = _NUMBERS.get(dtype, dtype)
    if stride is None:
        return torch.empty(shape, dtype=numbers, device="cpu").view(dtype)
    elements = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = torch.UntypedStorage(elements * dtype.itemsize, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=numbers, device="cpu").set_(memory, 0, shape, stride).view(dtype)


def tensor_over(raw: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements that lie in `raw`, without a copy."""
    return torch.frombuffer(raw, dtype=_NUMBERS.get(dtype, dtype)).view(dtype)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The writable bytes of a contiguous CPU tensor. The view keeps the memory alive."""
    # The address alone would read beyond a view's elements, or in another order.
    assert tensor.is_contiguous(), "only what lies in one piece and in order can be seen as bytes"
    size_bytes = tensor.numel() * tensor.itemsize
    if size_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # ctypes holds the address only: this keeps the memory alive
    return memoryview(memory).cast("B")


def copy_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copies in place, without autograd; a tensor made in inference mode can be changed only in that mode."""
    is_inference = target.is_inference()
    # Entered only where it changes something: it costs more than the copy of a small tensor.
    mode = nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference)
    with mode, torch.no_grad():  # in this order: the first one turns grad on again
        target.copy_(source, non_blocking=non_blocking)


def window_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor for the window of a conversion: its memory returns to the system as soon as it is freed.

    Large ones are mapped, not allocated: the C library keeps freed blocks below 32 MiB. Later, larger tensors do not fit
    in there, and the process would hold more than its window.
    """
    count = torch.Size(shape).numel()
    size_bytes = count * dtype.itemsize
    if size_bytes < _MAPPED_BYTES_MIN:
        return empty_tensor(shape, dtype)
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it
    return tensor_over(memoryview(mapped)[:size_bytes], dtype).view(shape)


PIECE_BYTES = 4 << 20
_side_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def copy_to_host(tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """The bytes of a dense tensor on any device as they lie in memory, in pieces on the host.

    While the caller uses one piece, the next is copied. A piece is valid until the next one is asked for, and at most two
    are on the host. Earlier work of the current stream on the tensor is done first.
    """
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    parts = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    kind: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu", "pin_memory": data.is_cuda}
    places = [torch.empty(min(piece_bytes, len(data)), **kind) for _ in parts[:2]]
    under_way: list[tuple[torch.Tensor, DeviceCopies]] = []
    for number, part in enumerate(parts):
        place = places[number % 2][: len(part)]
        under_way.append((place, DeviceCopies([(place, part)])))
        if len(under_way) == 2:
            yield _wait_for_copy(*under_way.pop(0))
    for piece in under_way:
        yield _wait_for_copy(*piece)


class DeviceCopies:
    """Copies tensors to the host. The constructor copies CPU tensors, and begins the copies of GPU tensors.

    Copies from a GPU begin after the work that is queued on its current stream. The sources are kept until
    `wait_for_copies`.
    """

    def __init__(self, targets_and_sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # Kept until the copies end: the caching allocator could give a freed source to the next tensor.
        self._sources = [source for _, source in targets_and_sources if source.is_cuda]
        self._ends: dict[torch.device, torch.cuda.Event] = {}
        for device in {source.device for source in self._sources}:
            side = _side_stream(device)
            with torch.cuda.stream(side):
                for target, source in targets_and_sources:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
            self._ends[device] = side.record_event()
        for target, source in targets_and_sources:
            # After the GPUs' copies are queued: both go on at the same time.
            if not source.is_cuda:
                target.copy_(source)

    def hold_streams(self) -> None:
        """Work queued on GPUs' current streams from here on waits for the copies. This call does not wait."""
        for device, end in self._ends.items():
            torch.cuda.current_stream(device).wait_event(end)

    def wait_for_copies(self) -> None:
        """Returns once everything is copied. Raises RuntimeError, of CUDA: then the copied bytes are undefined."""
        for end in self._ends.values():
            end.synchronize()
        self._sources.clear()


def _wait_for_copy(place: torch.Tensor, copies: DeviceCopies) -> torch.Tensor:
    copies.wait_for_copies()
    return place


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that runs after all work of the current one so far, and that later work does not wait for."""
    side = _side_streams.get(device)
    if side is None:
        side = _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    return side


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
            # The last copy from this buffer may still run, and would then copy the new bytes.
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
    """Copies bytes to a contiguous target on a GPU. Work of its current stream after `close` waits for the copies."""

    def __init__(self, target: torch.Tensor) -> None:
        self._bytes = target.reshape(-1).view(torch.uint8)
        self._ring = _ring_of(target.device)
        # Earlier work, such as the target's initialisation, may still write to it.
        self._ring.stream.wait_stream(torch.cuda.current_stream(target.device))
        self._position = 0

    def place(self, start: int, length: int) -> memoryview | None:
        """Memory for these bytes in the buffer that is copied next. None: they do not come next, or do not fit."""
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
