"""Feeds: take the verified bytes of one item as they come in, and bring them into the planner's tensor."""

from collections.abc import Callable

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.dcp.load.item_reader import ItemReader, target_of
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.destination import Destination, destination_for
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensor

ReadWhole = Callable[[], memoryview]


class Feed:
    """One item. Its bytes come in ascending order, in pieces that may leave gaps where nothing is needed.

    A contiguous tensor's data goes into the target piece by piece; anything else is gathered first.
    """

    def __init__(
        self,
        item: ReadItem,
        info: StorageInfo,
        stored: StoredTensor | None,
        source: str,
        readers: tuple[ItemReader, LoadPlanner, ReadWhole],
    ) -> None:
        self._item = item
        self._length = info.length
        self._stored = stored
        self._source = source
        self._reader, self._planner, self._read_whole = readers
        self._is_sliced = stored is not None and stored.rows(item).length < stored.data_bytes
        self._head = b""
        self._gathered: memoryview | None = None if stored else memoryview(bytearray(info.length))
        self._destination: Destination | None = None
        self._target: torch.Tensor | None = None
        self._rows = ByteRange(0, 0)

    def take(self, piece: memoryview, position: int) -> None:
        """Bytes of the item from `position` on.

        Raises:
            ObjectCorrupt: they are intact and not what the metadata says. ConfigInvalid: as `target_of`. And what the
            planner raises.
        """
        if self._stored is not None and self._destination is None and self._gathered is None:
            missing = len(self._stored.head) - len(self._head)
            self._head += piece[:missing]
            if len(self._head) < len(self._stored.head):
                return
            self._begin(self._stored)
        if self._gathered is not None:
            self._gathered[position : position + len(piece)] = piece
        elif self._destination is not None and self._stored is not None:
            start = len(self._stored.head) + self._rows.offset
            wanted = piece[max(0, start - position) : max(0, start + self._rows.length - position)]
            if wanted:
                self._destination.put(wanted)

    def memory_of(self, position: int, length: int) -> memoryview | None:
        """Where `length` bytes of the item from `position` on, which come next, may be read to; None: anywhere."""
        if self._stored is None or self._destination is None:
            return None
        start = position - len(self._stored.head) - self._rows.offset
        if start < 0 or start + length > self._rows.length:
            return None
        return self._destination.place(start, length)

    def _begin(self, stored: StoredTensor) -> None:
        if self._head != stored.head:  # another torch wrote it, or another layout
            if not self._is_sliced:
                self._gathered = memoryview(bytearray(self._length))
                self._gathered[: len(self._head)] = self._head
            return
        self._target = target_of(self._item, self._planner).detach()
        self._destination, self._rows = destination_for(self._target, stored, self._item)

    def finish(self) -> None:
        """All that is needed has been taken: hands the tensor, or the object, to the planner."""
        if self._destination is not None and self._target is not None:
            self._destination.close()
            self._planner.commit_tensor(self._item, self._target)
            return
        raw = self._gathered if self._gathered is not None else self._read_whole()
        self._reader.read(raw, self._item, self._planner, self._source)
