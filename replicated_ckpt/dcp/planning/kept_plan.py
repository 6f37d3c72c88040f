"""A plan that does not travel, as its receiver has it from the save before; and the error where it has not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from replicated_ckpt.errors import ReplicatedCkptError


class PlansUnknown(ReplicatedCkptError):
    """A rank kept its save plan back as unchanged, and the coordinator's planner has no such plan; nothing was saved."""

    default_hint = (
        "Save again: it is planned anew. Give every rank one CachedSavePlanner for all its saves, and make them together; "
        "or pass no planner."
    )


class ItemsKept(list[WriteItem]):
    """The items of a plan that did not travel. A planner that does not know of that would plan a rank with no items."""

    def __iter__(self) -> Iterator[WriteItem]:
        raise PlansUnknown(
            "A rank kept its plan back, as it is that of the save before; the coordinator has none of it."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ItemsKept, ()


@dataclass(frozen=True)
class Place:
    """What a plan was last: of which global plan, for which rank."""

    generation: str
    rank: int


@dataclass(frozen=True)
class KeptPlan(SavePlan):
    """In the place of a plan that the receiver has from the save before."""

    was: Place | None = None
    now: Place | None = None
    """From the coordinator: what it is from now on."""
    whole: SavePlan | None = None
    """What it stands for. It does not travel."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "whole": None}
