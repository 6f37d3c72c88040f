"""Where a tensor's data lies in its item, foretold from the metadata: what must be read, and how to tell it was right."""

import io
import pickle
from collections.abc import Sequence
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from replicated_ckpt.core.sources import ByteRange
from replicated_ckpt.dcp.container import TEMPLATE_BYTES_MAX, data_range
from replicated_ckpt.dcp.crc_switch import without_crc32
from replicated_ckpt.dcp.torch_private import StorageInfo

SURROUNDINGS_BYTES_MAX = 64 << 10
"""What a container has around its data; with more than that it is none that `torch.save` writes for one tensor."""
_KINDS_MAX = 4096


class StoredTensor:
    """A contiguous tensor in the container of `torch.save`: `head`, then its data in row-major order, then a tail.

    It is foretold, not known: only an item that begins with `head` has this layout.
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
        """Of one index of the first dimension; of a tensor without dimensions, all."""
        return self.data_bytes // self.shape[0] if self.shape else self.data_bytes

    def rows(self, item: ReadItem) -> ByteRange:
        """The rows that a read item touches, as bytes of the data."""
        if not self.shape:
            return ByteRange(0, self.data_bytes)
        return ByteRange(item.storage_offsets[0] * self.row_bytes, item.lengths[0] * self.row_bytes)


class _Head:
    """Takes what `torch.save` writes and keeps only what comes before the data."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self._parts: list[bytes] = []
        self._is_over = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._is_over = self._is_over or size >= self._data_bytes
        if not self._is_over:
            self._parts.append(bytes(data))
        return size

    def flush(self) -> None:
        """Nothing is buffered here."""

    def found(self) -> bytes | None:
        return b"".join(self._parts) if self._is_over else None


class StoredTensors:
    """Foretells the layout of items from a checkpoint's metadata. Keeps up to 4096 heads. One thread."""

    def __init__(self) -> None:
        self._metadata: Metadata | None = None
        self._by_kind: dict[tuple[torch.dtype, tuple[int, ...]], StoredTensor | None] = {}

    def describe(self, metadata: Metadata) -> None:
        """From now on items are of this checkpoint."""
        self._metadata = metadata

    def of(self, item: ReadItem, info: StorageInfo) -> StoredTensor | None:
        """How the item lies there if it is the contiguous tensor that the metadata describes; None: nothing is foretold."""
        kind = self._kind(item)
        if kind is None:
            return None
        if kind not in self._by_kind:
            if len(self._by_kind) >= _KINDS_MAX:
                return None
            self._by_kind[kind] = _foretold(*kind)
        stored = self._by_kind[kind]
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
        if hint < len(described.chunks) and described.chunks[hint].offsets == index.offset:
            return tuple(described.chunks[hint].sizes)
        return None


def needed(item: ReadItem, info: StorageInfo, stored: StoredTensor | None) -> Sequence[ByteRange]:
    """What must be read of the shard for an item: its head and the rows that are wanted, or all of it."""
    whole = ByteRange(info.offset, info.length)
    if stored is None or not stored.shape or item.lengths[0] == stored.shape[0]:
        return (whole,)
    slack = info.length - stored.data_bytes
    rows = stored.rows(item)
    return ByteRange(whole.offset, slack), ByteRange(whole.offset + rows.offset, slack + rows.length)


def _foretold(dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor | None:
    """Has `torch.save` write such a tensor and keeps what comes before its data. No memory is touched for the data."""
    stored = StoredTensor(dtype, shape, b"")
    size = stored.data_bytes
    try:
        storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        storage.resize_(size)
        strides = [1] * len(shape)
        for dimension in range(len(shape) - 2, -1, -1):
            strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
        if size > TEMPLATE_BYTES_MAX:
            stream = _Head(size)
            with without_crc32():
                torch.save(tensor, cast("IO[bytes]", stream))
            head = stream.found()
        else:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            raw = memoryview(buffer.getbuffer())
            head = bytes(raw[: data_range(raw)[0]])
    except (RuntimeError, ValueError, TypeError, pickle.PicklingError):
        return None
    return None if head is None else StoredTensor(dtype, shape, head)
