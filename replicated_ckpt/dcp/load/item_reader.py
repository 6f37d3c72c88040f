"""Reading items: each tensor or object of a shard goes to the planner once its bytes are verified."""

import io
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.dcp.objects.values import UnknownName
from replicated_ckpt.dcp.objects.weights_only import save_again
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo, narrow
from replicated_ckpt.dcp.tensors.container import TensorReader, other_tensor
from replicated_ckpt.dcp.tensors.stored_tensor import Destination, StoredTensor, destination_for
from replicated_ckpt.dcp.tensors.tensor_memory import copy_into
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ObjectUnsafe


class ItemReader:
    """Passes verified items to a planner. One thread.

    `trust_pickles`: passes objects as they are in the shard, and unpickles tensors of any class. Otherwise it passes
    objects that this process has loaded safely and pickled again.
    """

    def __init__(self, *, trust_pickles: bool) -> None:
        self._tensors = TensorReader()
        if not isinstance(trust_pickles, bool):
            raise ConfigInvalid(f"trust_pickles must be True or False, not {trust_pickles!r}.")
        self._trust_pickles = trust_pickles

    def read_item(self, raw: memoryview, item: ReadItem, planner: LoadPlanner, source: str) -> None:
        """Passes one item to the planner: an object, or the requested part of a tensor into the target tensor.

        Nothing of `raw` is kept.

        Raises:
            ObjectUnsafe: the object, or the tensor's own class, is not allowed. ObjectCorrupt: the item is intact, but
                is not what the metadata describes. ConfigInvalid: as `target_of`. Nothing was passed to the planner.
        """
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            # The planner unpickles objects without restrictions: only a pickle that this process has made is safe there.
            given = io.BytesIO(raw) if self._trust_pickles else save_again(raw, name, f"shard {source}")
            planner.load_bytes(item, given)
            return
        try:
            tensor = narrow(self._tensor(raw), item.storage_offsets, item.lengths)
        # An unknown class would run its own code on loading.
        except UnknownName as exc:
            raise ObjectUnsafe(name, f"shard {source}", exc.keys) from exc
        # Intact by its checksum: it was saved wrongly, or .metadata describes another item.
        except (ValueError, RuntimeError) as exc:
            raise ObjectCorrupt(source, "load", name, f"its bytes are intact, but not a tensor: {exc}") from exc
        # copy_ would silently broadcast a smaller tensor.
        if tuple(tensor.size()) != tuple(item.lengths):
            shapes = f"it has the shape {tuple(tensor.size())}, but the metadata has {tuple(item.lengths)}"
            raise ObjectCorrupt(source, "load", name, shapes)
        target = target_of(item, planner)
        copy_into(target, tensor)  # not into a detached view: a sparse or quantized target would not change
        planner.commit_tensor(item, target.detach())

    def _tensor(self, raw: memoryview) -> torch.Tensor:
        try:
            return self._tensors.read_tensor(raw)
        except UnknownName:
            if not self._trust_pickles:
                raise
            return other_tensor(torch.load(io.BytesIO(raw), weights_only=False))


def target_of(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """The planner's tensor for an item.

    Raises:
        ConfigInvalid: it has another shape than the planner asked for, or several of its elements share memory.
    """
    target = planner.resolve_tensor(item)
    name, asked, given = item.storage_index.fqn, tuple(item.lengths), tuple(target.size())
    if given != asked:
        raise ConfigInvalid(
            f"The planner {type(planner).__qualname__} asked for {asked} of {name!r}, but its resolve_tensor returned "
            f"a tensor of the shape {given}.",
            "Correct the planner: its resolve_tensor must return the shape read_item.lengths. The checkpoint is intact.",
        )
    is_strided = target.layout is torch.strided
    # copy_ into an expanded tensor writes the same memory several times: the result depends on the order.
    stride = target.stride() if is_strided else ()
    if 0 in stride and any(step == 0 and size > 1 for size, step in zip(given, stride, strict=True)):
        what = f"The target tensor for {name!r} has elements that share memory, as expand() makes them"
        raise ConfigInvalid(f"{what}: nothing can be loaded into it.", "Pass its clone(), or a tensor made by empty().")
    return target


ReadWhole = Callable[[], memoryview]


class Feed:
    """One item, whose bytes arrive in pieces, in ascending order. There may be gaps where no byte is needed.

    Data of a contiguous tensor goes into the target piece by piece. All other data is collected first.
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
        # An object, or a tensor without the expected layout, can only be made from the whole item.
        self._gathered: memoryview | None = None if stored else memoryview(bytearray(info.length))
        self._destination: Destination | None = None
        self._target: torch.Tensor | None = None
        self._rows = ByteRange(0, 0)

    def take_piece(self, piece: memoryview, position: int) -> None:
        """Takes bytes of the item from `position` on.

        Raises:
            ObjectCorrupt: they are intact, but are not what the metadata describes. ConfigInvalid: as `target_of`. And
                any error of the planner.
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
            # A piece may begin before the rows that are wanted, and end after them.
            wanted = piece[max(0, start - position) : max(0, start + self._rows.length - position)]
            if wanted:
                self._destination.put(wanted)

    def memory_of(self, position: int, length: int) -> memoryview | None:
        """Memory for the next `length` bytes of the item, from `position` on; None: any memory will do."""
        if self._stored is None or self._destination is None:
            return None
        start = position - len(self._stored.head) - self._rows.offset
        if start < 0 or start + length > self._rows.length:
            return None
        return self._destination.place(start, length)

    def _begin(self, stored: StoredTensor) -> None:
        if self._head != stored.head:  # another torch wrote it, or in another layout: its data may lie elsewhere
            # If only a part was fetched, `finish_feed` reads the whole item.
            if not self._is_sliced:
                self._gathered = memoryview(bytearray(self._length))
                self._gathered[: len(self._head)] = self._head
            return
        self._target = target_of(self._item, self._planner).detach()
        self._destination, self._rows = destination_for(self._target, stored, self._item)

    def finish_feed(self) -> None:
        """Called once all needed bytes were taken: passes the tensor, or the object, to the planner."""
        if self._destination is not None and self._target is not None:
            self._destination.close()
            self._planner.commit_tensor(self._item, self._target)
            return
        raw = self._gathered if self._gathered is not None else self._read_whole()
        self._reader.read_item(raw, self._item, self._planner, self._source)
