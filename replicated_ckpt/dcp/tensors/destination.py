"""Destinations of a tensor's verified bytes as they come in, piece by piece."""

import ctypes
from typing import Protocol

import torch
from torch.distributed.checkpoint.planner import ReadItem

from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.dcp.runtime.torch_private import narrow
from replicated_ckpt.dcp.tensors.container import is_plain
from replicated_ckpt.dcp.tensors.memory import copy_into, memory_of, tensor_over
from replicated_ckpt.dcp.tensors.pinned import PinnedCopies
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensor
from replicated_ckpt.stores.files.direct import address_of

BATCH_BYTES = 4 << 20  # one call of torch for a batch of rows, not for each


class Destination(Protocol):
    """Takes the bytes of a part of a tensor's data, in order and without gaps."""

    def place(self, start: int, length: int) -> memoryview | None:
        """Memory to which the next bytes, from `start` on, may be read before they are put; None: any memory will do."""

    def put(self, piece: memoryview) -> None:
        """The next bytes; they are valid during the call."""

    def close(self) -> None:
        """Everything was put: afterwards the target holds it (a GPU's in the order of its current stream)."""


class Memory:
    """The target's own memory, on the CPU. Bytes that are put may lie where they belong already."""

    def __init__(self, target: torch.Tensor) -> None:
        self._memory = memory_of(target)
        self._address = target.data_ptr()

    def place(self, start: int, length: int) -> memoryview | None:
        return self._memory[start : start + length]

    def put(self, piece: memoryview) -> None:
        address = address_of(piece)
        # They were read to their place already: a copy onto itself would cost a pass over memory.
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
    """The best way into `target` for the part that `item` names, and the bytes of the stored data that it takes."""
    rows = stored.rows(item)
    is_alike = target.dtype == stored.dtype and tuple(item.lengths[1:]) == stored.shape[1:]
    if is_alike and is_plain(target) and target.is_contiguous():
        if target.device.type == "cpu":
            return Memory(target), rows
        if target.device.type == "cuda":
            return PinnedCopies(target), rows
    return Rows(target, stored, item), rows
