"""Writing tensors as the zip containers of `torch.save`: data straight from memory, what surrounds it from templates."""

from typing import Any, Protocol

import torch

from replicated_ckpt.dcp.tensors.container import fills_storage, is_dense, is_plain
from replicated_ckpt.dcp.tensors.device_copy import copy_to_host
from replicated_ckpt.dcp.tensors.memory import memory_of
from replicated_ckpt.dcp.tensors.torch_save import Envelope, learn_envelope, save_without_crc32

_TEMPLATES_MAX = 4096


class Stream(Protocol):
    """Where items are written: anything that counts its bytes."""

    position: int

    def write(self, data: memoryview, /) -> int:
        """Appends a copy."""

    def refer(self, data: memoryview, /) -> None:
        """Appends bytes that stay where and as they are until the stream is finished."""


class TensorWriter:
    """Writes tensors as containers. Keeps the surroundings of up to 4096 kinds of tensors. One thread."""

    def __init__(self) -> None:
        self._surroundings: dict[tuple[Any, ...], Envelope | None] = {}

    def write(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Appends a tensor, as a CPU tensor of its own storage.

        One on the CPU whose elements lie together, in any order, is not copied: the stream is told where they lie. What
        the stream raises comes out as it is.
        """
        tensor = tensor.detach()
        if not is_plain(tensor):
            save_without_crc32(_alone_in_its_storage(tensor.cpu()), stream)
            return
        surrounding = self._surrounding_of(tensor)
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
        """None: there are gaps between the tensor's elements, or its container is not understood."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        try:
            return self._surroundings[key]
        except KeyError:
            found = learn_envelope(*key) if is_dense(tensor.shape, tensor.stride()) else None
            if len(self._surroundings) < _TEMPLATES_MAX:
                self._surroundings[key] = found
            return found


def _alone_in_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if it is a view: else the whole storage would be written."""
    is_view = tensor.layout is torch.strided and not fills_storage(tensor)
    return tensor.clone() if is_view else tensor
