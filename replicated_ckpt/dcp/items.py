"""Items: how one tensor or object lies in a shard. The container is that of `torch.save`, so stock torch reads it."""

import io

import torch
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from replicated_ckpt.dcp.container import TensorReader
from replicated_ckpt.dcp.objects import save_again
from replicated_ckpt.dcp.tensor_writer import Stream, TensorWriter
from replicated_ckpt.dcp.torch_private import narrowed
from replicated_ckpt.dcp.unloadable import warn_if_unloadable
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt

ALIGNMENT_BYTES = 64
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))


class ItemWriter:
    """Writes items to a stream. One thread; may be kept from save to save."""

    def __init__(self) -> None:
        self._tensors = TensorWriter()

    def write(self, stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
        """Resolves one item and appends it; returns its offset and length in bytes.

        Its tensor stays as it is until the stream is finished. Its data ends up aligned to 64 bytes, as the zip aligns it
        within the item. Whatever the planner raises passes through.
        """
        data = planner.resolve_data(item)
        stream.write(_PADDING[: -stream.position % ALIGNMENT_BYTES])
        offset = stream.position
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise ConfigInvalid(
                    f"The planner resolved {item.index.fqn!r} to {type(data).__name__}, not to BytesIO."
                )
            warn_if_unloadable(data.getbuffer(), item.index.fqn)
            stream.refer(data.getbuffer())
        else:
            if not isinstance(data, torch.Tensor):
                raise ConfigInvalid(
                    f"The planner resolved {item.index.fqn!r} to {type(data).__name__}, not to a tensor."
                )
            self._tensors.write(data, stream)
        return offset, stream.position - offset


class ItemReader:
    """Gives verified items to a planner. One thread.

    `trust_pickles`: objects go to it as they lie in the shard; else as this process has saved them again.
    """

    def __init__(self, *, trust_pickles: bool) -> None:
        self._tensors = TensorReader()
        self._trust_pickles = trust_pickles

    def read(self, raw: memoryview, item: ReadItem, planner: LoadPlanner, source: str) -> None:
        """Gives one item to the planner: an object, or a tensor's named part into the target tensor.

        Nothing of `raw` is kept.

        Raises:
            ObjectUnsafe: the object is not loaded by default. ObjectCorrupt: the item is intact but not what the metadata
            says. Nothing was given to the planner.
        """
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            given = io.BytesIO(raw) if self._trust_pickles else save_again(raw, name, f"shard {source}")
            planner.load_bytes(item, given)
            return
        try:
            tensor = narrowed(self._tensors.read(raw), item.storage_offsets, item.lengths)
        except (ValueError, RuntimeError) as exc:
            raise ObjectCorrupt(source, "load", name, f"its bytes are intact but no tensor: {exc}") from exc
        target = target_of(item, planner, tuple(tensor.size()), source)
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def target_of(item: ReadItem, planner: LoadPlanner, shape: tuple[int, ...], source: str) -> torch.Tensor:
    """The planner's tensor for an item of that shape.

    Raises:
        ObjectCorrupt: it has another shape.
    """
    target = planner.resolve_tensor(item).detach()
    if tuple(target.size()) != shape:
        shapes = f"it has the shape {shape}, the plan asks for {tuple(target.size())}"
        raise ObjectCorrupt(source, "load", item.storage_index.fqn, shapes)
    return target
