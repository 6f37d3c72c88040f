"""Plans that do not travel, as their receivers have them from the save or load before; and the error where one has not."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError


class PlansUnknown(ReplicatedCkptError):
    """A rank kept its save plan back as unchanged, and the coordinator's planner has no such plan; nothing was saved."""

    default_hint = (
        "Save again: it is planned anew. Give every rank one CachedSavePlanner for all its saves, and make them together; "
        "or pass no planner."
    )


class CachedWriteItems(list[WriteItem]):
    """The items of a plan that did not travel. A planner that does not know of that would plan a rank with no items."""

    def __iter__(self) -> Iterator[WriteItem]:
        raise PlansUnknown(
            "A rank kept its plan back, as it is that of the save before; the coordinator has none of it."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedWriteItems, ()


@dataclass(frozen=True)
class Place:
    """What a plan was last: of which global plan, for which rank."""

    generation: str
    rank: int


@dataclass(frozen=True)
class CachedSavePlan(SavePlan):
    """In the place of a plan that the receiver has from the save before."""

    was: Place | None = None
    now: Place | None = None
    """From the coordinator: what it is from now on."""
    whole: SavePlan | None = None
    """What it stands for. It does not travel."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "whole": None}


class CachedReadItems(list[ReadItem]):
    """The items of a plan that stayed on its rank. A planner that looks at all ranks' items would miss that rank's."""

    def __iter__(self) -> Iterator[ReadItem]:
        raise ConfigInvalid(
            "A rank keeps its plan, as its planner is one that leaves plans as they are; this rank's planner is another.",
            "Pass planners of one class to `dcp.load` on all ranks.",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedReadItems, ()


@dataclass
class CachedLoadPlan(LoadPlan):
    """In the place of a plan whose rank keeps the items. `asked`: the names for which they ask, packed."""

    asked: bytes = b""


def hold(plan: LoadPlan) -> LoadPlan:
    """What travels in the place of `plan`: all of it but the items, and of these the names."""
    names = json.dumps(sorted({item.storage_index.fqn for item in plan.items}))
    kept: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(LoadPlan)}
    return CachedLoadPlan(**{**kept, "items": CachedReadItems(), "asked": zlib.compress(names.encode(), 1)})


def hand_back(plan: LoadPlan) -> LoadPlan:
    """What travels back to its rank, which knows for what it asks."""
    return replace(plan, asked=b"") if isinstance(plan, CachedLoadPlan) else plan


def names_asked(plans: Sequence[LoadPlan]) -> set[str]:
    """The names for which any of these plans asks, held or not."""
    names = {item.storage_index.fqn for plan in plans if not isinstance(plan, CachedLoadPlan) for item in plan.items}
    for packed in {plan.asked for plan in plans if isinstance(plan, CachedLoadPlan)}:  # many ranks ask for the same
        names.update(json.loads(zlib.decompress(packed)))
    return names
