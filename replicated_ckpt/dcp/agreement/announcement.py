"""The announcement of a save: upper bounds of its bytes, from the plans that DCP has made for all ranks."""

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.protocol.announced import NOTHING_ANNOUNCED, Announced
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlan

OBJECTS_BYTES_MAX = 8 << 30
"""Of one shard's objects together: how large they are is known only once they are pickled."""
_ITEM_BYTES_MAX = 4096
"""Container, alignment and checksums of a small item; those of a large one are far less than its own bytes."""
_SHARD_BYTES_MIN = 1 << 20


def announce(plans: Sequence[SavePlan]) -> Announced:
    """What a save of these plans brings at most, with room for planners that write wider types than they planned.

    Nothing is announced where DCP has kept back a plan because it is the one of the save before (`enable_plan_caching`);
    CachedSavePlanner says what such a plan stands for.
    """
    plans = [_whole(plan) for plan in plans]
    if not all(plan.usable for plan in plans):
        return NOTHING_ANNOUNCED
    sizes = [_shard_bytes_max(plan) for plan in plans]
    return Announced(max(sizes, default=0), sum(sizes))


def tensor_bytes(plan: SavePlan) -> int | None:
    """Of the tensors that a plan writes, as they are planned; None: DCP has kept the plan back."""
    plan = _whole(plan)
    return _tensor_bytes(plan) if plan.usable else None


def _whole(plan: SavePlan) -> SavePlan:
    return (plan.whole or plan) if isinstance(plan, CachedSavePlan) else plan


def _shard_bytes_max(plan: SavePlan) -> int:
    objects = OBJECTS_BYTES_MAX if any(item.tensor_data is None for item in plan.items) else 0
    return _SHARD_BYTES_MIN + 2 * _tensor_bytes(plan) + len(plan.items) * _ITEM_BYTES_MAX + objects


def _tensor_bytes(plan: SavePlan) -> int:
    tensors = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors)
