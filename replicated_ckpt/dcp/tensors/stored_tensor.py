"""Where the bytes of a tensor lie in its item, predicted from the metadata; and the memory that they are read into."""

import ctypes
import pickle
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo, narrow
from replicated_ckpt.dcp.tensors.container import is_plain, learn_envelope
from replicated_ckpt.dcp.tensors.tensor_memory import PinnedCopies, copy_into, memory_of, tensor_over
from replicated_ckpt.stores.files.direct import address_of

SURROUNDINGS_BYTES_MAX = 64 << 10
"""The most bytes that `torch.save` writes around the data of one tensor. A container with more has another layout."""
_KINDS_MAX = 4096


class StoredTensor:
    """A contiguous tensor in the container of `torch.save`: `head`, then its data in row-major order, then a tail.

    The layout is an assumption: only an item that begins with `head` has this layout.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], head: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.head = head
        self.data_bytes = dtype.itemsize
        for size in shape:
            self.data_bytes *= size

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension. For a tensor without dimensions, all bytes."""
        return self.data_bytes // self.shape[0] if self.shape else self.data_bytes

    def rows(self, item: ReadItem) -> ByteRange:
        """The rows that a read item touches, as bytes of the data."""
        if not self.shape:
            return ByteRange(0, self.data_bytes)
        return ByteRange(item.storage_offsets[0] * self.row_bytes, item.lengths[0] * self.row_bytes)


class StoredTensors:
    """Predicts the layout of items from a checkpoint's metadata. Caches up to 4096 heads. One thread."""

    def __init__(self) -> None:
        self._metadata: Metadata | None = None
        self._by_kind: dict[tuple[torch.dtype, tuple[int, ...]], StoredTensor | None] = {}

    def set_metadata(self, metadata: Metadata | None) -> None:
        """Sets the checkpoint of the items that `of` gets from now on. None: no layout is known."""
        self._metadata = metadata

    def of(self, item: ReadItem, info: StorageInfo) -> StoredTensor | None:
        """The item's layout if it is the contiguous tensor that the metadata describes; None: unknown until it is read."""
        kind = self._kind(item)
        if kind is None:
            return None
        if kind not in self._by_kind:
            if len(self._by_kind) >= _KINDS_MAX:
                return None
            self._by_kind[kind] = _expect_layout(*kind)
        stored = self._by_kind[kind]
        # Another torch may write a longer end: a part read by this layout would be cut off.
        fits = stored and len(stored.head) <= info.length - stored.data_bytes <= SURROUNDINGS_BYTES_MAX
        return stored if fits else None

    def _kind(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if item.type == LoadItemType.BYTE_IO or self._metadata is None:
            return None
        described = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(described, TensorStorageMetadata):
            return None
        sizes = self._sizes(item.storage_index, described)
        if sizes is None or len(sizes) != len(item.lengths) or 0 in sizes:
            return None
        return described.properties.dtype, sizes

    @staticmethod
    def _sizes(index: MetadataIndex, described: TensorStorageMetadata) -> tuple[int, ...] | None:
        hint = index.index or 0
        # If the hint is of another chunk, the plan was made from other metadata: only a read shows the layout.
        if hint < len(described.chunks) and described.chunks[hint].offsets == index.offset:
            return tuple(described.chunks[hint].sizes)
        return None


def plan_ranges(item: ReadItem, info: StorageInfo, stored: StoredTensor | None) -> Sequence[ByteRange]:
    """The ranges of the shard to read for an item: its head and the wanted rows, or all of it."""
    whole = ByteRange(info.offset, info.length)
    if stored is None or not stored.shape or item.lengths[0] == stored.shape[0]:
        return (whole,)
    # `slack` is the length of head and tail together. The head may have any part of it, so that much more is read.
    slack = info.length - stored.data_bytes
    rows = stored.rows(item)
    return ByteRange(whole.offset, slack), ByteRange(whole.offset + rows.offset, slack + rows.length)


def _expect_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor | None:
    """Has `torch.save` write such a tensor, and keeps the bytes before its data. No memory is touched for the data."""
    try:
        found = learn_envelope(dtype, shape, torch.empty(shape, device="meta").stride())
    # No such dtype on the CPU, or torch refuses to save it: the whole item is read then.
    except (RuntimeError, ValueError, TypeError, pickle.PicklingError):
        return None
    return None if found is None else StoredTensor(dtype, shape, bytes(found[0]))


BATCH_BYTES = 4 << 20  # one call of torch for a batch of rows, not for each


class Destination(Protocol):
    """Takes the bytes of a part of a tensor's data, in order and without gaps."""

    def place(self, start: int, length: int) -> memoryview | None:
        """Memory to which the next bytes, from `start` on, may be read before they are put; None: any memory will do."""

    def put(self, piece: memoryview) -> None:
        """Takes the next bytes, which are valid during the call."""

    def close(self) -> None:
        """Called after the last `put`. Then the target has all bytes; on a GPU, for later work of its current stream."""


class Memory:
    """The target's own memory, on the CPU. The caller may have read bytes to their place before it puts them."""

    def __init__(self, target: torch.Tensor) -> None:
        self._memory = memory_of(target)
        self._address = target.data_ptr()

    def place(self, start: int, length: int) -> memoryview | None:
        return self._memory[start : start + length]

    def put(self, piece: memoryview) -> None:
        address = address_of(piece)
        # Bytes that lie in their place already are not copied onto themselves.
        if address != self._address:
            ctypes.memmove(self._address, address, len(piece))
        self._address += len(piece)

    def close(self) -> None:
        """Does nothing: the bytes are in place."""


class Rows:
    """A target that differs in type, strides or width: rows are collected, then torch copies and converts them."""

    def __init__(self, target: torch.Tensor, stored: StoredTensor, item: ReadItem) -> None:
        self._target = target if stored.shape else target.reshape(1)
        self._dtype = stored.dtype
        self._row_shape = stored.shape[1:]
        self._offsets, self._lengths = item.storage_offsets[1:], item.lengths[1:]
        # One row may be larger than a batch.
        batch = max(1, BATCH_BYTES // stored.row_bytes) * stored.row_bytes
        self._row_bytes = stored.row_bytes
        self._gathered = memoryview(bytearray(min(batch, self._row_bytes * self._target.shape[0])))
        self._filled = 0
        self._row = 0

    def place(self, start: int, length: int) -> memoryview | None:
        """None: rows are collected first."""
        del start, length
        return None

    def put(self, piece: memoryview) -> None:
        while piece:
            part = piece[: len(self._gathered) - self._filled]
            self._gathered[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            piece = piece[len(part) :]
            if self._filled == len(self._gathered):
                self._flush()

    def _flush(self) -> None:
        count = self._filled // self._row_bytes
        if count:
            rows = tensor_over(self._gathered[: self._filled], self._dtype)
            rows = rows.view(count, *self._row_shape)
            rows = narrow(rows, (0, *self._offsets), (count, *self._lengths))
            copy_into(self._target.narrow(0, self._row, count), rows)
        self._row += count
        self._filled = 0

    def close(self) -> None:
        self._flush()


def destination_for(target: torch.Tensor, stored: StoredTensor, item: ReadItem) -> tuple[Destination, ByteRange]:
    """The Destination for `target` that copies least, and the range of the stored data that `item` needs."""
    rows = stored.rows(item)
    is_alike = target.dtype == stored.dtype and tuple(item.lengths[1:]) == stored.shape[1:]
    if is_alike and is_plain(target) and target.is_contiguous():
        if target.device.type == "cpu":
            return Memory(target), rows
        if target.device.type == "cuda":
            return PinnedCopies(target), rows
    return Rows(target, stored, item), rows
