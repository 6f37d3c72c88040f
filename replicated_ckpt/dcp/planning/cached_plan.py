"""Plans that are not sent, because the receiver has them from the last save or load. And the error if it does not."""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

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
    """The items of a plan that was not sent. It prevents that a planner without this cache plans a rank without items."""

    def __iter__(self) -> Iterator[WriteItem]:
        raise PlansUnknown(
            "A rank did not send its plan, because the plan has not changed since its last save. The coordinator does not "
            "have that earlier plan."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedWriteItems, ()


@dataclass(frozen=True)
class Place:
    """The last use of a plan: its global plan, and its rank in it."""

    generation: str
    rank: int


@dataclass(frozen=True)
class CachedSavePlan(SavePlan):
    """Stands for a plan that the receiver has from the previous save."""

    was: Place | None = None
    now: Place | None = None
    """From the coordinator: its place from now on."""
    whole: SavePlan | None = None
    """The plan that it stands for, on the rank that has made this one. It does not travel."""

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
    """The items of a plan that stayed on its rank. A planner that reads all ranks' items would miss that rank's."""

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


def hold(plan: LoadPlan) -> LoadPlan:
    """The plan that is sent in place of `plan`: everything except the items, and the names in these."""
    names = json.dumps(sorted({item.storage_index.fqn for item in plan.items}))
    kept: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(LoadPlan)}
    return CachedLoadPlan(**{**kept, "items": CachedReadItems(), "asked": zlib.compress(names.encode(), 1)})


def hand_back(plan: LoadPlan) -> LoadPlan:
    """The plan that is sent back to its rank, which has its own names."""
    return replace(plan, asked=b"") if isinstance(plan, CachedLoadPlan) else plan


def names_asked(plans: Sequence[LoadPlan]) -> set[str]:
    """The names in all of these plans, whether or not the items were sent."""
    names = {item.storage_index.fqn for plan in plans if not isinstance(plan, CachedLoadPlan) for item in plan.items}
    for packed in {plan.asked for plan in plans if isinstance(plan, CachedLoadPlan)}:  # many ranks ask for the same
        names.update(json.loads(zlib.decompress(packed)))
    return names
