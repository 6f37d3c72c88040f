"""The container of one tensor: the zip archive that `torch.save` writes and stock torch reads, without its cost per tensor.

What surrounds the data is the same for all tensors of one dtype, shape and stride, so it is made once by `torch.save`
and then repeated; on the way back, it is understood once by `torch.load`. The zip's own CRC32 stays out: our CRC32C covers
these bytes. Source: torch.serialization (torch 2.7 to 2.15); PKWARE APPNOTE 6.3.10 for the zip records.
"""

import io
import struct
from dataclasses import dataclass

import torch

from replicated_ckpt.dcp.memory import tensor_over
from replicated_ckpt.stores.address import address_of

TEMPLATE_BYTES_MAX = 1 << 20
_TEMPLATES_MAX = 4096
_EOCD = struct.Struct("<4s4H2LH")
_ZIP64_EOCD = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_HEADER_BYTES = 30
_U32_MAX = 0xFFFFFFFF


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


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
        has_no_scale = _has_no_scale(tensor)
        plain = (is_plain(tensor) or has_no_scale) and fills_storage(tensor)
        if not start or not size or not plain or tensor.numel() * tensor.element_size() != size:
            return tensor
        layout = _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), size)
        if len(self._layout_by_head) < _TEMPLATES_MAX:
            self._layout_by_head[bytes(raw[:start])] = layout
        return _viewed(raw[start : start + size], layout) if has_no_scale else tensor


def _has_no_scale(tensor: torch.Tensor) -> bool:
    """Whether it was numbers seen as a quantized type: `torch.load` makes a quantized tensor without a scale of them."""
    if not tensor.is_quantized:
        return False
    try:
        tensor.qscheme()
    except RuntimeError:
        return True
    return False


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether each byte of a strided tensor's storage is exactly one of its elements' bytes, in any order of dimensions."""
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    return is_dense(tensor.shape, tensor.stride())


def is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether elements with these strides fill one range of memory, each byte of it once, in any order of dimensions."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def _viewed(data: memoryview, layout: _Layout) -> torch.Tensor:
    if address_of(data) % layout.dtype.itemsize:
        data = memoryview(bytearray(data))
    return tensor_over(data, layout.dtype).as_strided(layout.shape, layout.stride)
