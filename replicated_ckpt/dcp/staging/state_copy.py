"""A copy of a state dict, independent of later changes of the original. Its storages lie in one piece of memory."""

import copy
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from replicated_ckpt.dcp.runtime.gc_pause import pause_collections
from replicated_ckpt.dcp.runtime.torch_private import DTensor, ShardedTensor, local_part, with_local_part, with_shards
from replicated_ckpt.dcp.staging.segment import StagingRefused
from replicated_ckpt.dcp.tensors.container import is_freed, is_plain
from replicated_ckpt.dcp.tensors.tensor_memory import DeviceCopies, empty_tensor

ALIGNMENT_BYTES = 512
"""Alignment of each storage's first byte: direct I/O may need it, and it is a multiple of every dtype's size."""
_ATOMS = frozenset((str, int, float, bool, complex, bytes, type(None)))
_COPIED_AS_THEY_ARE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""Tensors of all other types are copied as bytes: torch cannot copy elements of some types."""
_Key = tuple[torch.device, int, int]
_Found = tuple[torch.Tensor, torch.Tensor, _Key]
"""A tensor, the same detached from its history, and its storage."""


class StateCopy:
    """Finds the storages of a state dict, then copies it once. `is_on_gpu`: whether a GPU has any of the storages.

    Every storage is copied whole and once, however many tensors share it; the copies share it in the same way. Tensors
    of the copy lie on the CPU with shape, strides, dtype and `requires_grad` of the original. DTensors, ShardedTensors and
    other tensors made of tensors are rebuilt from the copies. Everything else is copied as by `copy.deepcopy`.
    """

    @pause_collections()
    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.size_bytes = 0
        self._state_dict = state_dict
        self._found: dict[int, _Found] = {}
        self._places: dict[_Key, int] = {}
        self._memory: memoryview | None = None
        self._made: dict[_Key, torch.Tensor] = {}
        self.is_on_gpu = False
        self.copies = DeviceCopies(())
        self._due: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}  # with the originals: an id is reused once its value is gone
        self._memo: dict[int, Any] = {}
        self._find(state_dict, {})

    @pause_collections()
    def make(self, memory: memoryview | None) -> dict[str, Any]:
        """Makes and returns the copy. Call it once.

        The storages of the copy lie in `memory`, which has at least `size_bytes`. With `memory=None` each storage gets
        memory of its own. All objects around the bytes are made first, because copying the bytes flushes everything else
        from the caches. When this returns, copies from GPUs are still under way in `copies`.
        """
        self._memory = memory
        copied: dict[str, Any] = self._copy(self._state_dict)
        with torch.no_grad():
            self.copies = DeviceCopies(self._due)
        return copied

    def _find(self, value: Any, seen: dict[int, Any]) -> None:
        """Finds the tensors in a state dict that consist only of elements. Tensors inside other objects do not count."""
        if type(value) in _ATOMS or id(value) in seen:
            return
        # A state dict may contain itself: without `seen` this would not end.
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._find_parts(value)
        elif isinstance(value, dict) or type(value) in (list, tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                self._find(inner, seen)

    def _find_parts(self, tensor: torch.Tensor) -> None:
        if type(tensor) is DTensor:
            self._find_parts(local_part(tensor))
        elif (plain := _plain(tensor)) is not None:
            storage = plain.untyped_storage()
            size_bytes = storage.nbytes()
            key = storage.device, storage.data_ptr(), size_bytes
            self._found[id(tensor)] = tensor, plain, key
            self.is_on_gpu = self.is_on_gpu or plain.is_cuda
            if size_bytes and key not in self._places:
                self._places[key] = self.size_bytes
                self.size_bytes += size_bytes + -size_bytes % ALIGNMENT_BYTES
        elif isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards():
                self._find_parts(shard.tensor)
        elif _is_made_of_tensors(tensor):
            made: Any = tensor
            if hasattr(made, "trigger_wait"):  # an AsyncCollectiveTensor: its collective may still be writing
                made.trigger_wait()
            for name in made.__tensor_flatten__()[0]:
                if isinstance(part := getattr(tensor, name), torch.Tensor):
                    self._find_parts(part)

    def _copy(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, torch.Tensor):
            copied = self._copy_tensor(value)
        elif isinstance(value, dict):
            copied = copy.copy(value)  # with its attributes
            self._copies[id(value)] = value, copied  # before its values, which may contain it again
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
        found = self._found.get(id(tensor))
        if found is not None:
            copied = self._copy_plain(found[1], found[2])
            if type(tensor) is not torch.Tensor:
                copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
            if attributes := vars(tensor):
                vars(copied).update(attributes)
            return copied.requires_grad_() if tensor.requires_grad else copied
        if type(tensor) is DTensor:
            part = self._copy(local_part(tensor))
            return with_local_part(tensor, part if self._memory is not None else _begin_storage(part))
        if isinstance(tensor, ShardedTensor):
            shards = [copy.copy(shard) for shard in tensor.local_shards()]
            for shard in shards:
                shard.tensor = self._copy(shard.tensor)
            return with_shards(tensor, shards)
        if _is_made_of_tensors(tensor):
            made: Any = tensor
            names, context = made.__tensor_flatten__()
            parts = {name: self._copy(getattr(tensor, name)) for name in names}
            return _like(tensor, type(made).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride()))
        return tensor if tensor.is_meta else _like(tensor, self._copy_object(tensor))

    def _copy_plain(self, plain: torch.Tensor, key: _Key) -> torch.Tensor:
        # Reading a freed storage would be a segmentation fault.
        if is_freed(plain):
            self._leave(plain, "it has a tensor whose storage was freed")
            return plain
        if key not in self._places:  # there are no bytes in it
            return empty_tensor(tuple(plain.shape), plain.dtype, plain.stride())
        # Tensors that share a storage share its copy, so that each byte is copied once.
        made = self._made.get(key)
        if made is None:
            storage = plain.untyped_storage()
            # The tensor fills its whole storage: it is copied as it is, without another tensor over the raw bytes.
            is_all = plain.storage_offset() == 0 and plain.nbytes == key[2] and plain.is_contiguous()
            if is_all and plain.dtype in _COPIED_AS_THEY_ARE:
                self._made[key] = made = self._room_for(plain, key)
                return made
            self._made[key] = made = self._room_for(torch.empty(0, dtype=torch.uint8, device=key[0]).set_(storage), key)
        there = made.untyped_storage()
        return empty_tensor((0,), plain.dtype).set_(there, plain.storage_offset(), plain.size(), plain.stride())

    def _room_for(self, source: torch.Tensor, key: _Key) -> torch.Tensor:
        """A tensor on the CPU, of the same shape and type, in its place in the copy. `make` copies the elements later."""
        if self._memory is None:
            there = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        else:
            count, offset = source.numel(), self._places[key]
            there = torch.frombuffer(self._memory, dtype=source.dtype, count=count, offset=offset).resize_(source.shape)
        self._due.append((there, source))
        return there

    def _copy_object(self, value: Any) -> Any:
        """A copy by the value's own code. If that fails for a Mapping or list, its entries are copied: DCP saves those."""
        failure: Exception | None = None
        for copy_value in (_copy_deeply, _copy_by_pickle):
            try:
                return copy_value(value, self._memo)
            except Exception as exc:  # noqa: BLE001 - its own code runs
                self._memo, failure = {}, exc  # the old memo has parts of the failed copy
        if isinstance(value, Mapping):
            return {key: self._copy(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return list(map(self._copy, value))
        return self._leave(value, f"a value of {type(value).__name__} cannot be copied: {failure}")

    def _leave(self, value: Any, why: str) -> Any:
        """For a value that cannot be copied. Without `memory`, DCP sends the copy to another process now, so this returns
        the value itself.

        Otherwise raises StagingRefused: the state is saved without a copy, as in a synchronous save. The value itself would
        contain later changes of training.
        """
        if self._memory is None:
            return value
        raise StagingRefused(f"The state is not copied: {why.rstrip('.')}.")


def _like(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The copy, with the original's `requires_grad`, which its parts do not have."""
    if tensor.requires_grad and not copied.requires_grad:
        copied.requires_grad_()
    return copied


def _begin_storage(part: torch.Tensor) -> torch.Tensor:
    """The same elements in the same memory, at the beginning of a storage of their own.

    On torch 2.15, a process dies when it sends a DTensor whose part does not begin its storage to another process. torch
    2.7 sends it.
    """
    if not part.storage_offset():
        return part
    if not part.numel():
        return empty_tensor(tuple(part.shape), part.dtype, part.stride())
    raw = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    rest = torch.frombuffer(raw.numpy(), dtype=torch.uint8, offset=int(part.storage_offset()) * part.element_size())
    return empty_tensor((0,), part.dtype).set_(rest.untyped_storage(), 0, part.size(), part.stride())


def _copy_deeply(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        raise TypeError("a deep copy of a tensor that is conjugated lazily is another tensor")
    return copy.deepcopy(value, memo)


def _copy_by_pickle(value: Any, memo: dict[int, Any]) -> Any:
    del memo
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    with torch.device("cpu"):  # sparse tensors would come to torch's default device
        return torch.load(pickled, weights_only=False)  # what this very process has written


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The detached tensor, if it consists only of elements in memory, or is a Parameter that does. Else None."""
    if (
        not (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter))
        or tensor.is_meta
        or is_lazy(tensor)
    ):
        return None
    plain = tensor.detach()
    return plain if is_plain(plain) else None


def _is_made_of_tensors(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")
