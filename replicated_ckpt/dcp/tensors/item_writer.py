"""Writes items into a shard: each tensor or object in the container of `torch.save`, so that stock torch can read it."""

import io
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from replicated_ckpt.dcp.objects.weights_only import warn_if_class_is_unknown, warn_if_unloadable
from replicated_ckpt.dcp.tensors.container import (
    Envelope,
    fills_storage,
    is_dense,
    is_freed,
    is_plain,
    learn_envelope,
    save_without_crc32,
)
from replicated_ckpt.dcp.tensors.tensor_memory import copy_to_host, memory_of
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError

_TEMPLATES_MAX = 4096  # tensors of ever new shapes must not fill the memory


class Stream(Protocol):
    """The stream to which items are written: anything that counts its bytes."""

    position: int

    def write(self, data: memoryview, /) -> int:
        """Appends a copy."""

    def refer(self, data: memoryview, /) -> None:
        """Appends bytes without a copy. They must stay unchanged until the stream is finished."""


class TensorWriter:
    """Writes tensors as containers. Caches the bytes around the data of up to 4096 kinds of tensors. One thread."""

    def __init__(self) -> None:
        self._surroundings: dict[tuple[Any, ...], Envelope | None] = {}

    def write_tensor(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Appends a tensor, as a CPU tensor of its own storage.

        A dense one on the CPU, in any order of elements, is not copied: the stream refers to its memory. Errors of the
        stream pass unchanged.
        """
        tensor = tensor.detach()
        if not is_plain(tensor):
            save_without_crc32(_alone_in_its_storage(tensor.cpu()), stream)
            return
        surrounding = self._surrounding_of(tensor)
        # Gaps between the elements would be written, too. A copy has none.
        if surrounding is None:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            surrounding = self._surrounding_of(tensor)
        if surrounding is None:
            save_without_crc32(tensor.cpu(), stream)
            return
        head, tail = surrounding
        stream.write(head)
        if tensor.device.type == "cpu":
            as_it_lies = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
            stream.refer(memory_of(as_it_lies))
        else:
            for piece in copy_to_host(tensor):
                stream.write(memory_of(piece))
        stream.write(tail)

    def _surrounding_of(self, tensor: torch.Tensor) -> Envelope | None:
        """None: there are gaps between the tensor's elements, or its container is not as expected."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        try:
            return self._surroundings[key]
        except KeyError:
            found = learn_envelope(*key) if is_dense(tensor.shape, tensor.stride()) else None
            if len(self._surroundings) < _TEMPLATES_MAX:
                self._surroundings[key] = found
            return found


def _alone_in_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of a view, because `torch.save` would write the whole storage of the view."""
    is_view = tensor.layout is torch.strided and not fills_storage(tensor)
    return tensor.clone() if is_view else tensor


ALIGNMENT_BYTES = 64
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))
_PLANNER_HINT = "Correct resolve_data of the planner that you pass to dcp.save."
_META_HINT = "Before the save, give its module memory (`to_empty`) and values. Or leave the tensor out of the state."
_FREED_HINT = (
    "Save the tensor while it has its values: FSDP, for example, frees whole parameters between computations. Zeros that "
    "autograd has made never have memory: save a clone of them."
)


def align(stream: Stream) -> None:
    """Pads the stream so that the next item is aligned as in a zip file of its own. A load then needs no copy of it."""
    stream.write(_PADDING[: -stream.position % ALIGNMENT_BYTES])


class ItemWriter:
    """Writes items to a stream. One thread; may be kept from save to save."""

    def __init__(self) -> None:
        self._tensors = TensorWriter()

    def write_item(self, stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
        """Resolves one item and appends it; returns its offset and length in bytes.

        The tensor must stay unchanged until the stream is finished. Its data is aligned to 64 bytes in the shard. Errors of
        the planner, or of a tensor's own class, pass through with a note of the entry.
        """
        try:
            return self._write(stream, item, planner)
        except ReplicatedCkptError:
            raise
        except Exception as exc:
            exc.add_note(f"The entry {item.index.fqn!r} of the state dict raised it.")
            raise

    def _write(self, stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
        data = planner.resolve_data(item)
        align(stream)
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
            tensor = data.detach()  # a plain tensor, if it was a parameter
            # Reading its elements would be a segmentation fault.
            if is_freed(tensor):
                raise ConfigInvalid(
                    f"{item.index.fqn!r} has no memory: its storage was freed, or never held its values.", _FREED_HINT
                )
            if tensor.is_meta and tensor.numel():
                raise ConfigInvalid(f"{item.index.fqn!r} is on the meta device: it has no values.", _META_HINT)
            if type(tensor) is not torch.Tensor:
                warn_if_class_is_unknown(type(tensor), item.index.fqn)
            self._tensors.write_tensor(tensor, stream)
        return offset, stream.position - offset
