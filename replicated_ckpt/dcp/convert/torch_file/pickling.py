"""The pickle inside a file of `torch.save`, for tensors whose elements are elsewhere and come later.

A tensor is pickled as a call that rebuilds it from a storage, and the storage as a persistent id; the elements are a
record of their own beside the pickle. Source: torch.serialization.save (torch 2.7 to 2.15).
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from replicated_ckpt.dcp.convert.entries.source import TensorEntry
from replicated_ckpt.dcp.objects.storages import STORAGE_BY_DTYPE
from replicated_ckpt.dcp.tensors.memory import empty_tensor
from replicated_ckpt.errors import ConfigInvalid

PROTOCOL = 2


@dataclass(frozen=True)
class _Storage:
    """Stands for a storage: a text for its elements' record, and how it is to be seen."""

    key: str
    kind: type
    size: int


@dataclass(frozen=True)
class Absent:
    """Stands in a state dict for a tensor whose elements come later."""

    entry: TensorEntry


class StatePickler(pickle.Pickler):
    """Pickles a state dict with Absent tensors as `torch.save` would pickle it with the tensors.

    Afterwards `absent` has the entry of each such tensor by its record's key, and `present` the tensors that objects
    brought along.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=PROTOCOL)
        self.absent: dict[str, TensorEntry] = {}
        self.present: dict[str, torch.Tensor] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Absent):
            key = self._next_key()
            self.absent[key] = obj.entry
            like = empty_tensor((0,), obj.entry.dtype)
            stride = torch.empty(obj.entry.shape, device="meta").stride()  # of rows in order; no memory is taken
            return _rebuilding(like, key, obj.entry.shape, stride)
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            key, tensor = self._next_key(), obj.detach().cpu().contiguous().resolve_conj().resolve_neg()
            self.present[key] = tensor
            like = empty_tensor((0,), obj.dtype).requires_grad_(obj.requires_grad)
            return _rebuilding(like, key, tuple(tensor.shape), tensor.stride())
        return NotImplemented

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.size)
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):
            raise ConfigInvalid("An object holds a storage, which is not converted.", "Leave it out with --exclude.")
        return None

    def _next_key(self) -> str:
        return str(len(self.absent) + len(self.present))


def _rebuilding(like: torch.Tensor, key: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Any, ...]:
    """How torch itself pickles such a tensor, with another storage, shape and stride."""
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # typed storages are on their way out: torch.save still writes them
        rebuild, arguments = like.__reduce_ex__(PROTOCOL)[:2]  # type: ignore[no-untyped-call]
        storage, _, _, _, *more = arguments
        count = torch.Size(shape).numel()
        if isinstance(storage, torch.UntypedStorage):
            stand_in = _Storage(key, torch.UntypedStorage, count * like.itemsize)
        else:
            stand_in = _Storage(key, STORAGE_BY_DTYPE[like.dtype], count)
    return rebuild, (stand_in, 0, shape, stride, *more)
