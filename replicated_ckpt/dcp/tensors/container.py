"""The container of one tensor: the zip archive that `torch.save` writes and stock torch reads, without its cost per tensor.

The bytes around the data are equal for all tensors of one dtype, shape and stride, so `torch.save` makes them once
and they are repeated; on the way back, the pickle is read once. The zip's own CRC32 is left out: our CRC32C covers it.
Source: torch.serialization (torch 2.7 to 2.15).
"""

from dataclasses import dataclass

import torch

from replicated_ckpt.core.integrity.archive import find_records, within
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import tensor_of
from replicated_ckpt.dcp.objects.storages import Storages, copy_records, dtype_of, record_of
from replicated_ckpt.dcp.objects.weights_only import ObjectValues, pickle_in
from replicated_ckpt.dcp.tensors.tensor_memory import empty_tensor, tensor_over
from replicated_ckpt.stores.files.direct import address_of

TEMPLATE_BYTES_MAX = 1 << 20
_TEMPLATES_MAX = 4096  # a hostile checkpoint may have any number of shapes


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has no memory: `resize_(0)` of its storage has freed it, or it never had any.

    Zeros that autograd made, and tensors of a trace, never have any: reading their elements is a segmentation fault.
    """
    return is_plain(tensor) and tensor.numel() > 0 and not tensor.is_meta and tensor.data_ptr() == 0


def data_range(raw: memoryview) -> tuple[int, int]:
    """The position of the tensor's data in a container, and its size in bytes.

    Raises:
        ValueError: `raw` is not a container of one stored tensor.
    """
    record = find_records(within(raw), len(raw)).get("data/0")
    if record is None:
        raise ValueError("not a container of one tensor")
    return record.start, record.size


@dataclass(frozen=True)
class _Layout:
    """The tensor that one kind of container describes, apart from its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size_bytes: int
    offset: int


class TensorReader:
    """Reads containers as tensors, without a copy where memory alignment allows it. One thread."""

    def __init__(self) -> None:
        self._data_range_by_tail: dict[bytes, tuple[int, int]] = {}
        self._layout_by_head: dict[bytes, _Layout] = {}

    def read_tensor(self, raw: memoryview) -> torch.Tensor:
        """The tensor in a container; it may share memory with `raw` and is valid only as long as that keeps its bytes.

        Raises:
            ValueError, RuntimeError: it is not a container of a tensor.
        """
        start, size = self._data_range(raw)
        layout = self._layout_by_head.get(bytes(raw[:start])) if 0 < start <= TEMPLATE_BYTES_MAX else None
        # The same head over data of another size: its shape would read beyond the end.
        if layout is None or layout.size_bytes != size:
            return self._learn(raw, start, size)
        return _view(raw[start : start + size], layout)

    def _data_range(self, raw: memoryview) -> tuple[int, int]:
        # The end of a zip file lists its records: equal ends of equal length mean equal places.
        key = len(raw).to_bytes(8, "little") + bytes(raw[-640:])
        known = self._data_range_by_tail.get(key)
        if known is None:
            record = find_records(within(raw), len(raw)).get("data/0")
            known = (record.start, record.size) if record is not None else (0, 0)
            if len(self._data_range_by_tail) < _TEMPLATES_MAX:
                self._data_range_by_tail[key] = known
        return known

    def _learn(self, raw: memoryview, start: int, size: int) -> torch.Tensor:
        """Reads the pickle of a tensor, and caches the layout if it is a simple one."""
        records = find_records(within(raw), len(raw))
        outline = tensor_of(tree := follow(pickle_in(within(raw), records)))
        # Several records, or data that does not begin the storage: made as any object.
        if outline is None or record_of(outline.storage, records).start != start:
            return other_tensor(ObjectValues(Storages(records, copy_records(raw))).whole(tree, len(raw)))
        layout = _Layout(dtype_of(outline), outline.shape, outline.stride, size, outline.offset)
        if len(self._layout_by_head) < _TEMPLATES_MAX:
            self._layout_by_head[bytes(raw[:start])] = layout
        return _view(raw[start : start + size], layout)


def other_tensor(value: object) -> torch.Tensor:
    """The value of a container without a plain tensor. Raises ValueError: it is not a tensor at all."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a container of {type(value).__name__}, not of a tensor")  # noqa: TRY004 - of bytes
    return value


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


def _view(data: memoryview, layout: _Layout) -> torch.Tensor:
    if not data:
        return empty_tensor((0,), layout.dtype).as_strided(layout.shape, layout.stride, layout.offset)
    # torch crashes or misreads elements at an address that is not a multiple of their size.
    if address_of(data) % layout.dtype.itemsize:
        data = memoryview(bytearray(data))
    return tensor_over(data, layout.dtype).as_strided(layout.shape, layout.stride, layout.offset)
