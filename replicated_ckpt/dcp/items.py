"""Items: how one tensor or object lies in a shard. The container is that of `torch.save`, so stock torch reads it."""

import io
import threading
from typing import Protocol

import torch
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from replicated_ckpt.dcp.torch_private import narrowed
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt

_crc_switch = threading.Lock()


class Stream(Protocol):
    """Where items are written: anything that counts its bytes."""

    position: int

    def write(self, data: memoryview, /) -> int: ...


class _Flushable:
    """Gives `torch.save` the `flush` that it calls; a tee flushes at the end only."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, data: memoryview) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        """Nothing is buffered here."""


def write_item(stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
    """Resolves one item and appends it to the stream; returns its offset and length in bytes.

    The tensor is not copied if it is contiguous, on the CPU and alone in its storage. Whatever the planner raises passes
    through.
    """
    offset = stream.position
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise ConfigInvalid(f"The planner resolved {item.index.fqn!r} to {type(data).__name__}, not to BytesIO.")
        stream.write(data.getbuffer())
    else:
        if not isinstance(data, torch.Tensor):
            raise ConfigInvalid(f"The planner resolved {item.index.fqn!r} to {type(data).__name__}, not to a tensor.")
        _write_tensor(stream, data)
    return offset, stream.position - offset


def _write_tensor(stream: Stream, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().size() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()  # else torch.save would write the whole storage that it is a view of
    with _crc_switch:
        was = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # our own CRC32C covers these bytes
        try:
            torch.save(tensor, _Flushable(stream))  # type: ignore[arg-type]  # it needs write and flush only
        finally:
            torch.serialization.set_crc32_options(was)


def read_item(raw: memoryview, item: ReadItem, planner: LoadPlanner, source: str) -> None:
    """Gives one verified item to the planner: bytes as they are, a tensor's named part into the target tensor.

    Raises:
        ObjectCorrupt: the item is intact but not what the metadata says; nothing was given to the planner.
    """
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(raw))
        return
    tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    tensor = narrowed(tensor, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise ObjectCorrupt(
            source,
            "load",
            item.storage_index.fqn,
            f"the tensor has the shape {tuple(tensor.size())}, the plan asks for {tuple(target.size())}",
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)
