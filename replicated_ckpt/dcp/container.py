"""The container of one tensor: the zip archive that `torch.save` writes and stock torch reads, without its cost per tensor.

What surrounds the data is the same for all tensors of one dtype, shape and stride, so it is made once by `torch.save`
and then repeated; on the way back, it is understood once by `torch.load`. The zip's own CRC32 stays out: our CRC32C covers
these bytes. Source: torch.serialization (torch 2.7 to 2.15); PKWARE APPNOTE 6.3.10 for the zip records.
"""

import ctypes
import io
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replicated_ckpt.dcp.crc_switch import without_crc32

TEMPLATE_BYTES_MAX = 1 << 20
_TEMPLATES_MAX = 4096
_EOCD = struct.Struct("<4s4H2LH")
_ZIP64_EOCD = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_HEADER_BYTES = 30
_U32_MAX = 0xFFFFFFFF


class Writable(Protocol):
    def write(self, data: memoryview, /) -> int: ...


class _Flushable:
    """Gives `torch.save` the `flush` that it calls; the stream below flushes at its end only."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream

    def write(self, data: memoryview) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        """Nothing is buffered here."""


def _saved(tensor: torch.Tensor, stream: Any) -> None:
    with without_crc32():
        torch.save(tensor, stream)


class TensorWriter:
    """Writes tensors as containers. Keeps the surroundings of up to 4096 kinds of tensors. One thread."""

    def __init__(self) -> None:
        self._surroundings: dict[tuple[Any, ...], tuple[memoryview, memoryview]] = {}

    def write(self, tensor: torch.Tensor, stream: Writable) -> None:
        """Appends a CPU tensor. One that fills its storage is not copied: its bytes are passed on as they lie in memory."""
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes > TEMPLATE_BYTES_MAX or not _is_plain(tensor) or not fills_storage(tensor):
            _saved(tensor, _Flushable(stream))
            return
        key = (tensor.dtype, tensor.shape, tensor.stride())
        surrounding = self._surroundings.get(key)
        if surrounding is None:
            surrounding = self._learned(tensor, size_bytes)
            if len(self._surroundings) < _TEMPLATES_MAX:
                self._surroundings[key] = surrounding
        head, tail = surrounding
        stream.write(head)
        stream.write(_memory_of(tensor, size_bytes))
        stream.write(tail)

    @staticmethod
    def _learned(tensor: torch.Tensor, size_bytes: int) -> tuple[memoryview, memoryview]:
        buffer = io.BytesIO()
        _saved(tensor, buffer)
        raw = memoryview(buffer.getvalue())
        start = data_range(raw)[0]
        return memoryview(bytes(raw[:start])), memoryview(bytes(raw[start + size_bytes :]))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _memory_of(tensor: torch.Tensor, size_bytes: int) -> memoryview:
    """The tensor's own memory; valid only while the tensor is."""
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")


def data_range(raw: memoryview) -> tuple[int, int]:
    """Where the tensor's data begins in a container, and its size in bytes.

    Raises:
        ValueError: `raw` is no container of one stored tensor.
    """
    try:
        entries, position = _central_directory(raw)
        for _ in range(entries):
            (
                magic,
                _,
                _,
                _,
                method,
                _,
                _,
                _,
                size,
                plain_size,
                name_bytes,
                extra_bytes,
                comment_bytes,
                _,
                _,
                _,
                offset,
            ) = _ENTRY.unpack_from(raw, position)
            if magic != b"PK\x01\x02":
                break
            name = bytes(raw[position + _ENTRY.size : position + _ENTRY.size + name_bytes])
            if name.endswith(b"/data/0"):
                if method != 0 or size != plain_size or _U32_MAX in (size, offset):
                    break
                name_local, extra_local = struct.unpack_from("<2H", raw, offset + 26)
                return offset + _LOCAL_HEADER_BYTES + name_local + extra_local, size
            position += _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    except struct.error as exc:
        raise ValueError(f"a damaged zip archive: {exc}") from exc
    raise ValueError("not a container of one tensor")


def _central_directory(raw: memoryview) -> tuple[int, int]:
    """Number of entries and position of the central directory."""
    magic, _, _, _, entries, _, offset, _ = _EOCD.unpack_from(raw, len(raw) - _EOCD.size)
    if magic != b"PK\x05\x06":
        raise ValueError("not a zip archive")
    if _U32_MAX in (offset, entries) or entries == 0xFFFF:
        fields = _ZIP64_EOCD.unpack_from(raw, len(raw) - _EOCD.size - 20 - _ZIP64_EOCD.size)
        entries, offset = fields[7], fields[9]
    return entries, offset


@dataclass(frozen=True)
class _Layout:
    """How the data of one kind of container is to be seen as a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size_bytes: int


class TensorReader:
    """Reads containers as tensors, without a copy where memory alignment allows it. One thread."""

    def __init__(self) -> None:
        self._data_range_by_tail: dict[bytes, tuple[int, int]] = {}
        self._layout_by_head: dict[bytes, _Layout] = {}

    def read(self, raw: memoryview) -> torch.Tensor:
        """The tensor in a container; it may share memory with `raw` and is valid only as long as that keeps its bytes.

        Raises:
            ValueError, RuntimeError, pickle.UnpicklingError: it is no container of a tensor.
        """
        start, size = self._data_range(raw)
        layout = self._layout_by_head.get(bytes(raw[:start])) if 0 < start <= TEMPLATE_BYTES_MAX else None
        if layout is None or layout.size_bytes != size:
            return self._learned(raw, start, size)
        return _viewed(raw[start : start + size], layout)

    def _data_range(self, raw: memoryview) -> tuple[int, int]:
        key = len(raw).to_bytes(8, "little") + bytes(raw[-640:])
        known = self._data_range_by_tail.get(key)
        if known is None:
            try:
                known = data_range(raw)
            except ValueError:
                known = (0, 0)  # larger than 4 GiB, or compressed: torch.load understands it
            if len(self._data_range_by_tail) < _TEMPLATES_MAX:
                self._data_range_by_tail[key] = known
        return known

    def _learned(self, raw: memoryview, start: int, size: int) -> torch.Tensor:
        """Loads by `torch.load`, which accepts tensors only, and remembers the layout if it is a simple one."""
        tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"a container of {type(tensor).__name__}, not of a tensor")  # noqa: TRY004 - of bytes
        room = len(self._layout_by_head) < _TEMPLATES_MAX
        plain = _is_plain(tensor) and fills_storage(tensor) and tensor.numel() * tensor.element_size() == size
        if start and size and room and plain:
            layout = _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), size)
            self._layout_by_head[bytes(raw[:start])] = layout
        return tensor


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether each byte of a strided tensor's storage is exactly one of its elements' bytes, in any order of dimensions."""
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _viewed(data: memoryview, layout: _Layout) -> torch.Tensor:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
    if address % layout.dtype.itemsize:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=layout.dtype).as_strided(layout.shape, layout.stride)
