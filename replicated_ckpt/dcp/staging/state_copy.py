"""A copy of a state dict that no change of the original reaches: its tensors' storages in one piece of memory."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch

from replicated_ckpt.dcp.runtime.torch_private import ShardedTensor, with_shards
from replicated_ckpt.dcp.tensors.container import is_plain
from replicated_ckpt.dcp.tensors.memory import empty_tensor

ALIGNMENT_BYTES = 512
"""Of each storage's first byte: what direct I/O may ask of memory, and a multiple of every dtype's size."""
_ATOMS = (str, int, float, bool, complex, bytes, type(None))
_Key = tuple[torch.device, int, int]


class StateCopy:
    """Finds the storages of a state dict when made, and copies it once.

    Every storage is copied whole and once, however many tensors share it, and those of the copy share it alike. Tensors
    come to lie on the CPU with shape, strides, dtype and `requires_grad` of the original. DTensors, ShardedTensors and
    other tensors that are made of tensors are made of the copies. Everything else is copied as by `copy.deepcopy`.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.size_bytes = 0
        self._state_dict = state_dict
        self._places: dict[_Key, tuple[int, torch.UntypedStorage]] = {}
        self._storages: dict[_Key, torch.UntypedStorage] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}  # the originals, too: no other value gets the id of one of them
        self._memo: dict[int, Any] = {}
        for tensor in _tensors_in(state_dict, {}):
            self._place(tensor.untyped_storage())

    def make(self, memory: memoryview | None) -> dict[str, Any]:
        """The copy. Its storages lie in `memory`, which has at least `size_bytes`; None: each in memory of its own."""
        for key, (offset, storage) in self._places.items():
            size_bytes = storage.nbytes()
            if memory is None:
                there = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            else:
                there = torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes, offset=offset)
            there.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            self._storages[key] = there.untyped_storage()
        copied: dict[str, Any] = self._copy(self._state_dict)
        return copied

    def _place(self, storage: torch.UntypedStorage) -> None:
        key = _key_of(storage)
        if storage.nbytes() and key not in self._places:
            self._places[key] = (self.size_bytes, storage)
            self.size_bytes += storage.nbytes() + -storage.nbytes() % ALIGNMENT_BYTES

    def _copy(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, torch.Tensor):
            copied = self._copy_tensor(value)
        elif isinstance(value, dict):
            copied = copy.copy(value)  # with its attributes
            self._copies[id(value)] = value, copied  # before what is in it, where it may be again
            for key, inner in value.items():
                copied[key] = self._copy(inner)
        elif type(value) is list:
            copied = []
            self._copies[id(value)] = value, copied
            copied.extend(map(self._copy, value))
        elif type(value) is tuple:
            copied = tuple(map(self._copy, value))
        else:
            copied = self._copy_object(value)
        self._copies[id(value)] = value, copied
        return copied

    def _copy_tensor(self, tensor: torch.Tensor) -> Any:
        plain = _plain(tensor)
        if plain is not None:
            copied = self._copy_plain(plain)
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
            vars(copied).update(vars(tensor))
            return copied.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, ShardedTensor):
            shards = [copy.copy(shard) for shard in tensor.local_shards()]
            for shard in shards:
                shard.tensor = self._copy(shard.tensor)
            return with_shards(tensor, shards)
        if _is_made_of_tensors(tensor):
            made: Any = tensor
            names, context = made.__tensor_flatten__()
            parts = {name: self._copy(getattr(tensor, name)) for name in names}
            return type(made).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
        return tensor if tensor.is_meta else self._copy_object(tensor)

    def _copy_plain(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._storages.get(_key_of(tensor.untyped_storage()))
        if storage is None:
            return empty_tensor(tuple(tensor.shape), tensor.dtype, tensor.stride())
        return empty_tensor((0,), tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copy_object(self, value: Any) -> Any:
        """What can be neither copied nor pickled stays as it is: writing it fails, as in a synchronous save, on all ranks.

        An error here would be this rank's alone, and the others would wait for it.
        """
        for copy_value in (_copy_deeply, _copy_by_pickle):
            try:
                return copy_value(value, self._memo)
            except Exception:  # noqa: BLE001 - its own code runs
                self._memo = {}  # parts of what failed are in it
        return value


def _copy_deeply(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        raise TypeError("a deep copy of a tensor that is conjugated lazily is another tensor")
    return copy.deepcopy(value, memo)


def _copy_by_pickle(value: Any, memo: dict[int, Any]) -> Any:
    del memo
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    return torch.load(pickled, weights_only=False)  # what this very process has written


def _tensors_in(value: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """The plain tensors that a state dict is made of; not those inside its objects."""
    if type(value) in _ATOMS or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield from _plain_parts(value)
    elif isinstance(value, dict) or type(value) in (list, tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner, seen)


def _plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    plain = _plain(tensor)
    if plain is not None:
        yield plain
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield from _plain_parts(shard.tensor)
    elif _is_made_of_tensors(tensor):
        made: Any = tensor
        if hasattr(made, "trigger_wait"):  # of a collective that may be under way: it still writes
            made.trigger_wait()
        for name in made.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor without its history, if it is nothing but elements in memory, or a Parameter of such."""
    if not (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)) or tensor.is_meta:
        return None
    plain = tensor.detach()
    return plain if is_plain(plain) else None


def _is_made_of_tensors(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def _key_of(storage: torch.UntypedStorage) -> _Key:
    return storage.device, storage.data_ptr(), storage.nbytes()
