"""Writing items: how one tensor or object lies in a shard. Its container is that of `torch.save`; stock torch reads it."""

import io

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from replicated_ckpt.dcp.objects.unloadable import warn_if_class_is_unknown, warn_if_unloadable
from replicated_ckpt.dcp.tensors.container import is_freed
from replicated_ckpt.dcp.tensors.tensor_writer import Stream, TensorWriter
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError

ALIGNMENT_BYTES = 64
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))
_PLANNER_HINT = "Correct resolve_data of the planner that is passed to dcp.save."
_META_HINT = "Give its module memory (`to_empty`) and values before it is saved, or leave it out of the state."
_FREED_HINT = (
    "Save it while it has its values: FSDP, say, frees whole parameters as long as they are not computed with. Of zeros "
    "that autograd has made, which never have memory, save a clone."
)


class ItemWriter:
    """Writes items to a stream. One thread; may be kept from save to save."""

    def __init__(self) -> None:
        self._tensors = TensorWriter()

    def write(self, stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
        """Resolves one item and appends it; returns its offset and length in bytes.

        Its tensor stays as it is until the stream is finished. Its data ends up aligned to 64 bytes, as the zip aligns it
        within the item. What the planner, or a tensor's own class, raises passes through, with a note of the entry.
        """
        try:
            return self._write(stream, item, planner)
        except ReplicatedCkptError:
            raise
        except Exception as exc:
            exc.add_note(f"It was raised for the entry {item.index.fqn!r} of the state dict.")
            raise

    def _write(self, stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
        data = planner.resolve_data(item)
        stream.write(_PADDING[: -stream.position % ALIGNMENT_BYTES])
        offset = stream.position
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise ConfigInvalid(
                    f"The planner resolved {item.index.fqn!r} to {type(data).__name__}, not to BytesIO.", _PLANNER_HINT
                )
            warn_if_unloadable(data.getbuffer(), item.index.fqn)
            stream.refer(data.getbuffer())
        else:
            if not isinstance(data, torch.Tensor):
                raise ConfigInvalid(
                    f"The planner resolved {item.index.fqn!r} to {type(data).__name__}, not to a tensor.", _PLANNER_HINT
                )
            tensor = data.detach()  # of a parameter that is a plain one
            if is_freed(tensor):
                raise ConfigInvalid(
                    f"{item.index.fqn!r} has no memory: its storage was freed, or never held its values.", _FREED_HINT
                )
            if tensor.is_meta and tensor.numel():
                raise ConfigInvalid(f"{item.index.fqn!r} is on the meta device: it has no values.", _META_HINT)
            if type(tensor) is not torch.Tensor:
                warn_if_class_is_unknown(type(tensor), item.index.fqn)
            self._tensors.write(tensor, stream)
        return offset, stream.position - offset
