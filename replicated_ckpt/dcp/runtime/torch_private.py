"""The only place that imports or calls private parts of torch.

tests/dcp/test_torch_private.py checks each on the supported versions.

Each is here because torch has no public name for it. DCP passes neither the process group nor the outcome of its last step
to a storage writer or reader. The c10d store has no public getter, and the entries of `.metadata` are of private classes.
DCP's planners name nested entries in a way of their own.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from traceback import walk_stack
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

__all__ = [
    "DTensor",
    "OldTensorProperties",
    "ShardedTensor",
    "StorageInfo",
    "StoragePrefix",
]  # torch's names for other modules

MemoryFormat, OldMemoryFormat = dcp_metadata._MEM_FORMAT_ENCODING, old_metadata.MEM_FORMAT_ENCODING  # noqa: SLF001
layout_of = torch.serialization._get_layout  # noqa: SLF001
_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_ENTRY_POINTS = {
    (_SAVER, "save"),
    (_SAVER, "_save_state_dict"),
    (_LOADER, "load"),
    (_LOADER, "_load_state_dict"),
    (_LOADER, "_load_state_dict_from_keys"),
}


@dataclass(frozen=True)
class DcpCall:
    """The user's arguments of the DCP call under way. `no_dist`: this rank saves or loads alone."""

    process_group: Any
    no_dist: bool


def find_call() -> DcpCall | None:
    """The DCP call on this thread's stack; None without one.

    A storage writer or reader needs both arguments to reach the other ranks, or to wait for none. Seen on torch 2.7 to
    2.15: the entry points have these parameters, and do not pass them on.
    """
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _ENTRY_POINTS:
            values = frame.f_locals
            return DcpCall(values.get("process_group"), bool(values.get("no_dist", False)))
    return None


@dataclass(frozen=True)
class AsyncCall(DcpCall):
    """A `dcp.async_save` under way. `in_process`: a separate process saves. `future`: what the call will return, or None
    until it has made one.
    """

    in_process: bool
    future: "Future[Any] | None"


def find_async_call() -> AsyncCall | None:
    """The `dcp.async_save` on this thread's stack; None without one.

    The stager gets none of this as an argument. Seen on torch 2.15: `async_save` has the parameter
    `async_checkpointer_type`. It calls the stager's `stage` before it makes the future, and `synchronize_staging` later.
    """
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_SAVER, "async_save"):
            values = frame.f_locals
            kind = getattr(values.get("async_checkpointer_type"), "value", None)
            futures = (value for value in values.values() if isinstance(value, Future))
            given = values.get("process_group"), bool(values.get("no_dist"))
            return AsyncCall(*given, kind == "process", next(futures, None))
    return None


class _ByCoordinator(Protocol):
    """The messages that ranks exchange through their coordinator."""

    def gather_object(self, value: Any, /) -> list[Any] | None:
        """The values of all ranks, at the coordinator; None elsewhere."""

    def broadcast_object(self, value: Any, /) -> Any:
        """The coordinator's value, on every rank."""


class Collectives(_ByCoordinator, Protocol):
    """DCP's wrapper of a process group, or of a process alone."""

    def get_rank(self) -> int:
        """This rank in the group."""

    def get_world_size(self) -> int:
        """The number of ranks in the group."""


class StepCollectives(_ByCoordinator, Protocol):
    """The collectives of the steps of DCP."""

    coordinator: int
    """The coordinator's rank in the process group."""

    def scatter_object(self, values: list[Any] | None, /) -> Any:
        """The coordinator's value for this rank."""


_LEAVING = "create_global_plan", "finish_plan"
_OUTCOMES = {"all_reduce": "broadcast_object", "reduce_scatter": "all_gather_object"}
"""By the method in which `follow_step` is called: the last collective of the DCP call, which sends its outcome to ranks.

A save writes in its last step, an `all_reduce`, which ends with a `broadcast_object`. A load plans in a `reduce_scatter`.
It then reads in a step that ends with an `all_gather_object`.
"""


def follow_step(exchange: Callable[[Collectives, Any], Any]) -> bool:
    """Replaces the last collective of the current DCP call by `exchange(collectives, value)`. False: there is no call.

    A storage writer calls this while it writes, and a reader while it plans. A rank that fails before it reads then still
    takes part in the exchange. DCP makes a wrapper for each call, so nothing has to be restored after a failure. Seen on
    torch 2.7, 2.13 and 2.15.
    """
    wrapper, step = _wrapper_of_step()
    if wrapper is None:
        return False
    name = _OUTCOMES[step]
    setattr(wrapper, name, _once(weakref.ref(wrapper), name, exchange))
    return True


def use_collectives(collectives: StepCollectives) -> bool:
    """Has the current DCP call use these collectives until its end. False: there is no call.

    A storage writer or reader calls this in DCP's first step, before its first collective. Seen on torch 2.7 and 2.15: a
    step gathers, then scatters or broadcasts, by these methods of one wrapper.
    """
    wrapper, _ = _wrapper_of_step()
    if wrapper is None:
        return False
    collectives.coordinator = wrapper.coordinator_rank
    for name in ("gather_object", "scatter_object", "broadcast_object"):
        setattr(wrapper, name, getattr(collectives, name))
    return True


def may_omit_items(reader: object) -> bool:
    """Whether DCP uses this reader, and a planner that does not change plans. Plans may then be sent without their items.

    Seen on torch 2.7 to 2.15: `DefaultLoadPlanner.create_global_plan` and `finish_plan` return their argument. DCP's
    `_load_state_dict` calls no other method of the planner or the reader between `prepare_local_plan` and `read_data`.
    """
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_LOADER, "_load_state_dict"):
            planner = frame.f_locals.get("planner")
            # Compared by function: a subclass that overrides one of these may read or change the items.
            return frame.f_locals.get("storage_reader") is reader and all(
                getattr(getattr(planner, name, None), "__func__", None) is getattr(DefaultLoadPlanner, name)
                for name in _LEAVING
            )
    return False


def _wrapper_of_step() -> tuple[_DistWrapper | None, str]:
    """DCP's process group wrapper in the call under way, and its method that runs the step. None and "" without a call."""
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        # Other libraries have methods of these names: only DCP's own wrapper counts.
        wrapper = frame.f_locals.get("self") if frame.f_code.co_name in _OUTCOMES else None
        if isinstance(wrapper, _DistWrapper):
            return wrapper, frame.f_code.co_name
    return None, ""


def _once(
    found: "weakref.ref[_DistWrapper]", name: str, exchange: Callable[[Collectives, Any], Any]
) -> Callable[[Any], Any]:
    """A replacement for a method of the wrapper: it restores the method, then calls `exchange` with the wrapper.

    It holds the wrapper weakly: a reference cycle would keep the wrapper alive.
    """
    before = vars(found()).get(name)

    def call(value: Any) -> Any:
        wrapper = found()
        assert wrapper is not None, "its method is being called"
        if before is None:
            delattr(wrapper, name)
        else:
            setattr(wrapper, name, before)
        return exchange(wrapper, value)

    return call


def weights_only_names() -> Mapping[str, Any]:
    """The objects that `torch.load(weights_only=True)` lets a pickle name, by "module.name"."""
    found: Mapping[str, Any] = torch._weights_only_unpickler._get_allowed_globals()  # noqa: SLF001
    return found


def make_typed_storage(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """A storage for the functions that rebuild tensors, without torch's warning that typed storages are deprecated."""
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def default_store() -> "dist.Store":
    """The c10d store of the default process group.

    Raises:
        ValueError, RuntimeError: there is no default process group.
    """
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def metadata_version() -> str | None:
    """The format version that stock FileSystemWriter writes into `.metadata`. None: this torch writes none."""
    from torch.distributed.checkpoint import filesystem

    return getattr(filesystem, "CURRENT_DCP_VERSION", None)


def flatten(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """A nested state dict as DCP's planners flatten it: the values by FQN, and the path of each FQN."""
    values, paths = flatten_state_dict(state_dict)
    return dict(values), dict(paths)


@cache
def flattening_holds_tensors() -> bool:
    """Whether DCP's flattening keeps tensors in memory until Python's cyclic collector runs: on torch 2.7 and 2.8, but
    not on 2.15.
    """
    tensor = torch.empty(0)
    held = weakref.ref(tensor)
    flatten({"nested": [tensor]})
    del tensor
    return held() is not None


def narrow(tensor: torch.Tensor, offsets: Any, sizes: Any) -> torch.Tensor:
    """The part of a tensor that a read item names."""
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < tensor.size(dimension):
            tensor = tensor.narrow(dimension, offset, size)
    return tensor


def with_shards(tensor: ShardedTensor, shards: list[Shard]) -> ShardedTensor:
    """The same sharded tensor, with its metadata, over other data of this rank. No collective is called."""
    properties = tensor.metadata().tensor_properties
    # Not by the constructor: it calls a collective, in which the other ranks would take no part.
    made: ShardedTensor = ShardedTensor.__new__(
        ShardedTensor,
        tensor.sharding_spec(),
        tensor.metadata().size,
        dtype=properties.dtype,
        layout=properties.layout,
        pin_memory=properties.pin_memory,
        requires_grad=properties.requires_grad,
    )
    vars(made).update(vars(tensor))
    made._local_shards = shards  # noqa: SLF001
    return made


def local_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part. `DTensor.to_local` makes a new tensor at each call."""
    return tensor._local_tensor  # noqa: SLF001


def with_local_part(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """A DTensor of the same layout over another part.

    The public way, by `__tensor_flatten__` and back, makes each layout anew and takes twenty times as long. `__init__` is
    not called: it does nothing, but passes through torch.compile. Seen on torch 2.7 to 2.15.
    """
    made: Any = DTensor
    copied: DTensor = made.__new__(made, part, tensor._spec, requires_grad=tensor.requires_grad)  # noqa: SLF001
    return copied
