"""Plans that are sent once: parts that the receiver has from the last save or load are not sent again."""

import json
import math
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from replicated_ckpt.dcp.runtime.torch_private import DTensor, local_part
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError


class PlansUnknown(ReplicatedCkptError):
    """A rank did not send its unchanged save plan, but the coordinator does not have the earlier one. Nothing was
    saved.
    """

    default_hint = (
        "Save again: DCP then plans anew. On every rank, pass one CachedSavePlanner to all saves. Or pass no planner on "
        "any rank."
    )


class CachedWriteItems(list[WriteItem]):
    """Stands for the items of a plan that was not sent. A planner without this cache gets an error when it reads them."""

    def __iter__(self) -> Iterator[WriteItem]:
        raise PlansUnknown(
            "A rank did not send its plan, because the plan has not changed since its last save. The coordinator does not "
            "have that earlier plan."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedWriteItems, ()


@dataclass(frozen=True)
class Place:
    """Where a plan was used last: in which global plan, for which rank."""

    generation: str
    rank: int


@dataclass(frozen=True)
class CachedSavePlan(SavePlan):
    """Stands for a plan that the receiver has from the previous save."""

    was: Place | None = None
    now: Place | None = None
    """Set by the coordinator: the plan's place from now on."""
    whole: SavePlan | None = None
    """The plan that it stands for, on the rank that made this object. It is not sent."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "whole": None}


def find_whole(plan: SavePlan) -> SavePlan:
    """The plan itself. For a cached plan, on the rank that made it, the plan that it stands for."""
    return (plan.whole or plan) if isinstance(plan, CachedSavePlan) else plan


def planned_bytes(item: WriteItem) -> int:
    """Bytes of an item's tensor, as planned; 0 of an object."""
    tensor = item.tensor_data
    return 0 if tensor is None else math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize


class CachedReadItems(list[ReadItem]):
    """Stands for the items of a plan that stayed on its rank. A planner that reads them gets an error."""

    def __iter__(self) -> Iterator[ReadItem]:
        raise ConfigInvalid(
            "A rank sent only the names in its load plan, because its planner never changes plans. The coordinator's "
            "planner is of another class, and needs the whole plan.",
            "Pass planners of one class to `dcp.load` on all ranks.",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedReadItems, ()


@dataclass
class CachedLoadPlan(LoadPlan):
    """Stands for a plan whose rank keeps the items. `asked`: the names in these items, packed."""

    asked: bytes = b""


def without_items(plan: LoadPlan) -> LoadPlan:
    """The plan that is sent in place of `plan`. It has the names in the items, but not the items."""
    names = json.dumps(sorted({item.storage_index.fqn for item in plan.items}))
    kept: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(LoadPlan)}
    return CachedLoadPlan(**{**kept, "items": CachedReadItems(), "asked": zlib.compress(names.encode(), 1)})


def without_names(plan: LoadPlan) -> LoadPlan:
    """The plan that is sent back to its rank. It omits the names, which the rank has."""
    return replace(plan, asked=b"") if isinstance(plan, CachedLoadPlan) else plan


def names_asked(plans: Sequence[LoadPlan]) -> set[str]:
    """The names in all of these plans, whether or not the items were sent."""
    names = {item.storage_index.fqn for plan in plans if not isinstance(plan, CachedLoadPlan) for item in plan.items}
    for packed in {plan.asked for plan in plans if isinstance(plan, CachedLoadPlan)}:  # many ranks ask for the same
        names.update(json.loads(zlib.decompress(packed)))
    return names


Basis = tuple[tuple[bool, bool], tuple[str, ...], tuple[Any, ...]]
"""Everything on which a rank's local plan depends: two flags, the names in order, and the properties of each value.

The flags: this rank coordinates; autograd records, because `requires_grad` of a DTensor's part depends on it. The
properties are those that DCP's `create_default_local_save_plan` reads (torch 2.7 to 2.15).
"""


@dataclass(frozen=True)
class _Placed:
    """The coordinator's addition to a plan that it sends whole: the plan's place, beside the planner's own data."""

    place: Place
    planner_data: Any


@dataclass(frozen=True)
class _Planned:
    """The coordinator's cache of one global plan: the ranks' local plans, and the final ones."""

    generation: str
    local: Sequence[SavePlan]
    final: Sequence[SavePlan]
    metadata: Metadata


class CachedSavePlanner(DefaultSavePlanner):
    """Makes the same plans as DefaultSavePlanner, but sends only what has changed since the previous save.

    On each rank, pass one object as `planner=` to all saves of one state, by `dcp.save` or `dcp.async_save`.
    CheckpointManager has one. At every save each rank compares all that its own plan depends on: names,
    shapes, strides, dtypes, devices, placements, nesting. The contents of objects are not part of a plan. If nothing has
    changed on any rank, the coordinator uses its cached global plan and metadata. Otherwise it plans anew. The cache stays
    valid after failed saves, after loads, and after saves by other writers and planners.

    A subclass with a planning method of its own (`create_local_plan`, `create_global_plan`, `finish_plan`) plans anew at
    every save, because its plan may differ each time.

    Torch's own `enable_plan_caching` (2.15) keeps plans by the planner's class, so two states of one process share them.
    This planner keeps them in the object.

    Arguments as of DefaultSavePlanner, without `enable_plan_caching`. Not for several threads at once.

    Raises:
        PlansUnknown: raised by `dcp.save` on all ranks if the coordinator's planner does not have a rank's previous plan.
            Nothing was saved, and the next save plans anew.
    """

    _keeps_plans = True

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank=dedup_save_to_lowest_rank
        )
        self._place: Place | None = None
        self._local = self._final = SavePlan([])
        self._basis: Basis | None = None  # of `_local`
        self._asked: SavePlan | None = None  # until the save is planned
        self._asked_basis: Basis | None = None
        self._known: _Planned | None = None
        self._next_known: _Planned | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        planning = "create_local_plan", "create_global_plan", "finish_plan"
        cls._keeps_plans = all(getattr(cls, name) is getattr(CachedSavePlanner, name) for name in planning)

    def create_local_plan(self) -> SavePlan:
        """This rank's part, or a reference to the same plan of the previous save."""
        if not self._keeps_plans:
            return super().create_local_plan()
        plan, basis = self._plan_locally()
        # The previous save failed after this step: the coordinator may not have the plan that this rank would refer to.
        was_cut_short = self._asked is not None
        self._asked, self._asked_basis, self._next_known = plan, basis, None
        if was_cut_short or self._place is None or not _are_same(plan, self._local):
            return plan
        return CachedSavePlan(CachedWriteItems(), was=self._place, whole=self._local)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Coordinator: for each rank its final plan, or a reference to the final plan that the rank already has."""
        known = self._known
        local = tuple(self._find_whole(rank, plan) for rank, plan in enumerate(all_plans))
        are_kept = [isinstance(plan, CachedSavePlan) for plan in all_plans]
        if known is not None and all(are_kept) and len(all_plans) == len(known.local):
            planned, metadata = known, _to_give_out(known.metadata)
        else:
            final, metadata = super().create_global_plan(list(local))  # torch 2.7 writes into the list that it gets
            planned = _Planned(secrets.token_hex(8), local, final, _to_give_out(metadata))
            are_kept = [
                is_kept and known is not None and _are_same(plan, known.final[rank])
                for rank, (is_kept, plan) in enumerate(zip(are_kept, final, strict=True))
            ]
        self._next_known = planned
        return [
            _send(plan, Place(planned.generation, rank), all_plans[rank] if is_kept else None)
            for rank, (plan, is_kept) in enumerate(zip(planned.final, are_kept, strict=True))
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's final plan, with this save's storage data."""
        if isinstance(new_plan, CachedSavePlan):
            self._final, self._place = replace(self._final, storage_data=new_plan.storage_data), new_plan.now
        elif isinstance(new_plan.planner_data, _Placed):
            placed = new_plan.planner_data
            self._final, self._place = replace(new_plan, planner_data=placed.planner_data), placed.place
        else:  # of a coordinator with another planner
            self._final, self._place = new_plan, None
        self._local, self._asked = self._asked or SavePlan([]), None
        self._basis, self._asked_basis = self._asked_basis, None
        # Last: a save that fails before this step leaves the cache of the previous save.
        self._known, self._next_known = self._next_known, None
        self.plan = self._final
        return self._final

    def forget_state(self) -> None:
        """Drops the state. DCP leaves a reference to it here until the next save, so a copied state would stay in
        memory.

        ReplicatedWriter calls this once this rank's part is written, or its write has failed.
        """
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor or object of an item. For a whole plain tensor this skips DCP's checks for other kinds."""
        found = self.state_dict.get(index.fqn)
        # There are thousands of such items, and DCP's look-up would test each for every sharded kind.
        if is_plain_tensor(found) and index.offset == (0,) * found.dim():
            return found
        return super().lookup_object(index)

    def _plan_locally(self) -> tuple[SavePlan, Basis | None]:
        """DCP's plan, made anew unless everything that it depends on is unchanged."""
        basis = basis_of(self.state_dict, is_coordinator=self.is_coordinator)
        mappings = self.mappings if self.flatten_state_dict else None
        if basis is not None and basis == self._basis and mappings == self._local.planner_data:
            self.plan = self._local
            return self._local, basis
        return super().create_local_plan(), basis

    def _find_whole(self, rank: int, plan: SavePlan) -> SavePlan:
        if not isinstance(plan, CachedSavePlan):
            return plan
        known = self._known
        # The cache is of another global plan, as after a restart of one side: to use it would mix two states.
        if known is None or plan.was != Place(known.generation, rank):
            raise PlansUnknown(
                f"Rank {rank} did not send its plan, because the plan has not changed since its last save. The "
                "coordinator does not have that earlier plan."
            )
        return known.local[rank]


def _send(plan: SavePlan, place: Place, asked: SavePlan | None) -> SavePlan:
    """The form in which `plan` is sent to its rank. `asked`: this rank's own message, if it has the plan."""
    if isinstance(asked, CachedSavePlan):
        return CachedSavePlan(CachedWriteItems(), was=asked.was, now=place, whole=plan)
    return replace(plan, planner_data=_Placed(place, plan.planner_data))


def _to_give_out(metadata: Metadata) -> Metadata:
    """A copy, so that changes during one save do not reach the next. The entries themselves are shared."""
    described, data = dict(metadata.state_dict_metadata), copy(metadata.planner_data)
    return replace(metadata, state_dict_metadata=described, planner_data=data)


def _are_same(one: SavePlan, other: SavePlan) -> bool:
    return one.items == other.items and one.planner_data == other.planner_data


def basis_of(state_dict: Mapping[str, Any], *, is_coordinator: bool) -> Basis | None:
    """Everything on which DCP's plan of a flat state dict depends. Equal results give equal plans. None: some value may
    decide its own plan.
    """
    values = tuple(_basis_of_value(value) for value in state_dict.values())
    return None if None in values else ((is_coordinator, torch.is_grad_enabled()), tuple(state_dict), values)


def is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor of torch's own, without attributes by which it could influence DCP's plan."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not vars(value)


def _basis_of_value(value: object) -> tuple[Any, ...] | None:
    kind = type(value)
    if is_plain_tensor(value):
        return _basis_of_tensor(value)
    if isinstance(value, DTensor) and kind is DTensor:
        part = local_part(value)
        # A part of another class may give another plan each time.
        if not is_plain_tensor(part):
            return None
        layout = _basis_of_mesh(value), value.shape, value.stride(), value.requires_grad
        return *layout, *_basis_of_tensor(part)
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return None
    return (kind,)


def _basis_of_mesh(tensor: DTensor) -> tuple[Any, ...]:
    """Identifies the part of the tensor that this rank has. torch's own equality is too weak for that.

    After process groups are made anew, this rank may have another place in an equal mesh. In torch 2.7, `Shard(0)` equals
    a `_StridedShard(0)`, whose parts lie elsewhere.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    return mesh, mesh.get_coordinate(), placements, tuple(map(type, placements))


def _basis_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad, tensor.device
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.device, tensor.is_pinned()
