"""The container of one tensor: the zip archive that `torch.save` writes and stock torch reads, without its cost per tensor.

The bytes around the data are equal for all tensors of one dtype, shape and stride. `torch.save` makes them once, and the
writer repeats them. A load reads the pickle of such a container once. The zip's own CRC32 is left out, because our CRC32C
covers all of it.
Source: torch.serialization (torch 2.7 to 2.15).
"""

import io
import threading
from dataclasses import dataclass
from typing import Protocol

import torch

from replicated_ckpt.core.integrity.archive import find_records, within
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import tensor_of
from replicated_ckpt.dcp.objects.storages import Storages, copy_records, dtype_of, record_of
from replicated_ckpt.dcp.objects.weights_only import ObjectValues, pickle_in
from replicated_ckpt.dcp.tensors.tensor_memory import empty_tensor, tensor_over
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.files.direct import address_of

TEMPLATE_BYTES_MAX = 1 << 20
_TEMPLATES_MAX = 4096  # a hostile checkpoint may have any number of shapes


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided `torch.Tensor` whose memory has its values: not quantized, conjugate or negated."""
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
    """The layout of the tensor in one kind of container."""

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
        """The tensor in a container. It may share memory with `raw`, and is valid only while `raw` stays unchanged.

        Raises:
            ValueError, RuntimeError: it is not a container of a tensor.
        """
        start, size = self._data_range(raw)
        layout = self._layout_by_head.get(bytes(raw[:start])) if 0 < start <= TEMPLATE_BYTES_MAX else None
        # A known head before data of another size: its shape could reach beyond the end.
        if layout is None or layout.size_bytes != size:
            return self._learn(raw, start, size)
        return _view(raw[start : start + size], layout)

    def _data_range(self, raw: memoryview) -> tuple[int, int]:
        # The end of a zip file lists its records, so files of one length with equal ends have equal places.
        key = len(raw).to_bytes(8, "little") + bytes(raw[-640:])
        known = self._data_range_by_tail.get(key)
        if known is None:
            record = find_records(within(raw), len(raw)).get("data/0")
            known = (record.start, record.size) if record is not None else (0, 0)
            if len(self._data_range_by_tail) < _TEMPLATES_MAX:
                self._data_range_by_tail[key] = known
        return known

    def _learn(self, raw: memoryview, start: int, size: int) -> torch.Tensor:
        """Reads the pickle of a tensor. Caches the layout of a plain tensor."""
        records = find_records(within(raw), len(raw))
        outline = tensor_of(tree := follow(pickle_in(within(raw), records)))
        # Not a plain tensor, or its storage is another record than `data/0`: made like any object.
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
    """Whether a strided tensor uses each byte of its storage exactly once, in any order of dimensions."""
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    return is_dense(tensor.shape, tensor.stride())


def is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether elements with these strides use each byte of one range of memory once, in any order of dimensions."""
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


_DATA_WRITE_BYTES_MIN = 64 << 10
_RECORD_END_BYTES = 24
"""The end of a record of a zip container: `PK\\x07\\x08`, a CRC32 and two sizes."""
_crc32_lock = threading.Lock()
"""The switch for CRC32 in torch's zip containers is global to the process."""

Envelope = tuple[memoryview, memoryview]
"""The bytes of a container before and after the tensor's data."""


class Writable(Protocol):
    """The stream that `save_tensor` writes to."""

    def write(self, data: memoryview, /) -> int: ...


class _Recording:
    """A stream for `torch.save` that keeps the error of a write, because torch raises another error instead."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self.failure: ReplicatedCkptError | None = None

    def write(self, data: memoryview) -> int:
        try:
            return self._stream.write(data)
        except ReplicatedCkptError as exc:
            self.failure = self.failure or exc
            raise

    def flush(self) -> None:
        """Does nothing: the stream below flushes at its end only."""


def save_tensor(tensor: torch.Tensor, stream: Writable) -> None:
    """Writes a container to a stream.

    Raises:
        ReplicatedCkptError: the stream's own error. torch would replace it by that of closing its archive.
    """
    remembering = _Recording(stream)
    try:
        torch.save(tensor, remembering)  # type: ignore[arg-type]
    except RuntimeError as exc:
        if remembering.failure is None:
            raise
        raise remembering.failure from exc


def save_without_crc32(tensor: torch.Tensor, stream: Writable) -> None:
    """As `save_tensor`, without the CRC32s in the container: our own checksums cover all of it.

    Raises:
        ReplicatedCkptError: of the stream.
    """
    # The option is global: a torch.save of another thread must not lose its CRC32s for longer than this.
    with _crc32_lock:
        was = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save_tensor(tensor, stream)
        finally:
            torch.serialization.set_crc32_options(was)


class _WithoutData:
    """Keeps all that `torch.save` writes of a large tensor, except its data, which torch writes in large pieces."""

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


def learn_envelope(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Envelope | None:
    """The bytes around the data of a dense tensor of this kind, which are always the same. None: they are not as expected.

    `torch.save` writes a model of the tensor, whose memory is not touched and so costs nothing. Only its first bytes are
    zeroed. Otherwise they may be left from an old container, and if they look like the end of a record, torch writes
    another serialization ID. Source: torch 2.7 to 2.15, `ostream_write_func` in caffe2/serialize/inline_container.cc.

    Raises:
        RuntimeError, ValueError, TypeError, pickle.PicklingError: there are no such tensors, or torch does not save them.
    """
    model = empty_tensor(shape, dtype, stride)
    model.untyped_storage()[:_RECORD_END_BYTES].fill_(0)
    size_bytes = model.numel() * model.element_size()
    # The data of a large one is not collected: only its two ends are needed.
    if size_bytes > TEMPLATE_BYTES_MAX:
        parts = _WithoutData()
        save_without_crc32(model, parts)
        # If torch wrote the data in other pieces than expected, it cannot be separated from the ends.
        is_understood = parts.data_bytes == size_bytes
        return (memoryview(bytes(parts.head)), memoryview(bytes(parts.tail))) if is_understood else None
    buffer = io.BytesIO()
    save_without_crc32(model, buffer)
    raw = memoryview(buffer.getvalue())
    start = data_range(raw)[0]
    return memoryview(bytes(raw[:start])), memoryview(bytes(raw[start + size_bytes :]))
