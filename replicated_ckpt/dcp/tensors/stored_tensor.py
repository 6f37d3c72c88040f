"""The place of a tensor's data in its item, from the metadata: which bytes to read, and how to check the assumption."""

import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.torch_save import learn_envelope

SURROUNDINGS_BYTES_MAX = 64 << 10
"""The most that a container has around its data; a larger one was not written by `torch.save` for one tensor."""
_KINDS_MAX = 4096


class StoredTensor:
    """A contiguous tensor in the container of `torch.save`: `head`, then its data in row-major order, then a tail.

    It is an assumption: only an item that begins with `head` has this layout.
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
        """Bytes of one index of the first dimension; of a tensor without dimensions, all."""
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

    def describe(self, metadata: Metadata | None) -> None:
        """From now on items are of this checkpoint; None: of none."""
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
        # A hint of another chunk: the plan was made from other metadata, and only a read shows the layout.
        if hint < len(described.chunks) and described.chunks[hint].offsets == index.offset:
            return tuple(described.chunks[hint].sizes)
        return None


def plan_ranges(item: ReadItem, info: StorageInfo, stored: StoredTensor | None) -> Sequence[ByteRange]:
    """The ranges of the shard to read for an item: its head and the wanted rows, or all of it."""
    whole = ByteRange(info.offset, info.length)
    if stored is None or not stored.shape or item.lengths[0] == stored.shape[0]:
        return (whole,)
    # The tail's length is unknown: reading that much more covers a head of any length up to it.
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
