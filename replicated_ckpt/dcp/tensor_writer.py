"""Writing tensors as the zip containers of `torch.save`: their data straight from memory, what surrounds it from templates.

What surrounds the data is the same for all tensors of one dtype, shape and stride, so `torch.save` makes it once. The
zip's own CRC32 stays out: our CRC32C covers these bytes. Source: torch.serialization (torch 2.7 to 2.15).
"""

import ctypes
import io
from typing import Any, Protocol

import torch

from replicated_ckpt.dcp.container import TEMPLATE_BYTES_MAX, data_range, fills_storage, is_dense, is_plain
from replicated_ckpt.dcp.crc_switch import without_crc32
from replicated_ckpt.dcp.staging import staged

_TEMPLATES_MAX = 4096
_DATA_WRITE_BYTES_MIN = 64 << 10

Surrounding = tuple[memoryview, memoryview]


class Stream(Protocol):
    """Where items are written: anything that counts its bytes."""

    position: int

    def write(self, data: memoryview, /) -> int:
        """Appends a copy."""

    def refer(self, data: memoryview, /) -> None:
        """Appends bytes that stay where and as they are until the stream is finished."""


class _Flushable:
    """Gives `torch.save` the `flush` that it calls; the stream below flushes at its end only."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, data: memoryview) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        """Nothing is buffered here."""


class _WithoutData:
    """Takes what `torch.save` writes of a large tensor, and keeps all but its data, which it passes on in large pieces."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.data_bytes = 0

    def write(self, piece: memoryview) -> int:
        if len(piece) >= _DATA_WRITE_BYTES_MIN:
            self.data_bytes += len(piece)
        elif self.data_bytes:
            self.tail += piece
        else:
            self.head += piece
        return len(piece)

    def flush(self) -> None:
        """Nothing is buffered here."""


def _saved(tensor: torch.Tensor, stream: Any) -> None:
    with without_crc32():
        torch.save(tensor, stream)


class TensorWriter:
    """Writes tensors as containers. Keeps the surroundings of up to 4096 kinds of tensors. One thread."""

    def __init__(self) -> None:
        self._surroundings: dict[tuple[Any, ...], Surrounding | None] = {}

    def write(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Appends a tensor, as a CPU tensor of its own storage.

        One on the CPU whose elements lie together, in any order, is not copied: the stream is told where they lie.
        """
        tensor = tensor.detach()
        if not is_plain(tensor):
            _saved(_alone_in_its_storage(tensor.cpu()), _Flushable(stream))
            return
        surrounding = self._surrounding_of(tensor)
        if surrounding is None:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            surrounding = self._surrounding_of(tensor)
        if surrounding is None:
            _saved(tensor.cpu(), _Flushable(stream))
            return
        head, tail = surrounding
        stream.write(head)
        if tensor.device.type == "cpu":
            stream.refer(memory_of(tensor))
        else:
            for piece in staged(tensor):
                stream.write(memory_of(piece))
        stream.write(tail)

    def _surrounding_of(self, tensor: torch.Tensor) -> Surrounding | None:
        """None: there are gaps between the tensor's elements, or its container is not understood."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        try:
            return self._surroundings[key]
        except KeyError:
            found = _learned(*key) if is_dense(tensor.shape, tensor.stride()) else None
            if len(self._surroundings) < _TEMPLATES_MAX:
                self._surroundings[key] = found
            return found


def _learned(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Surrounding | None:
    """What surrounds the data of such a tensor; its memory is never touched, so that a large one costs nothing."""
    model = torch.empty_strided(shape, stride, dtype=dtype)
    size_bytes = model.numel() * model.element_size()
    if size_bytes > TEMPLATE_BYTES_MAX:
        parts = _WithoutData()
        _saved(model, parts)
        is_understood = parts.data_bytes == size_bytes
        return (memoryview(bytes(parts.head)), memoryview(bytes(parts.tail))) if is_understood else None
    buffer = io.BytesIO()
    _saved(model, buffer)
    raw = memoryview(buffer.getvalue())
    start = data_range(raw)[0]
    return memoryview(bytes(raw[:start])), memoryview(bytes(raw[start + size_bytes :]))


def _alone_in_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if it is a view: else the whole storage would be written."""
    is_view = tensor.layout is torch.strided and not fills_storage(tensor)
    return tensor.clone() if is_view else tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense CPU tensor, which lives as long as the view does."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # ctypes knows the address only
    return memoryview(memory).cast("B")
