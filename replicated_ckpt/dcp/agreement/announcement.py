"""The announcement of a save: upper bounds of its bytes, from the plans that DCP has made for all ranks."""

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.protocol.announced import NOTHING_ANNOUNCED, Announced
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlan

OBJECTS_BYTES_MAX = 8 << 30
"""For all objects of one shard together: their size is known only once they are pickled."""
_ITEM_BYTES_MAX = 4096
"""Container, alignment and checksums of a small item; those of a large one are far less than its own bytes."""
_SHARD_BYTES_MIN = 1 << 20


def announce(plans: Sequence[SavePlan]) -> Announced:
    """An upper bound of what a save of these plans writes, with room for planners that write wider types than planned.

    Returns NOTHING_ANNOUNCED where plan caching (`enable_plan_caching`) has left out an unchanged plan. The plan of a
    CachedSavePlanner holds the whole one, and counts.
    """
    plans = [_find_whole(plan) for plan in plans]
    # Plan caching replaces an unchanged plan by an empty one, from which no bound follows.
    if not all(plan.usable for plan in plans):
        return NOTHING_ANNOUNCED
    sizes = [_shard_bytes_max(plan) for plan in plans]
    return Announced(max(sizes, default=0), sum(sizes))


def tensor_bytes(plan: SavePlan) -> int | None:
    """Bytes of the tensors that a plan writes, as planned; None: DCP has left the plan out, as it did not change."""
    plan = _find_whole(plan)
    return _tensor_bytes(plan) if plan.usable else None


def _find_whole(plan: SavePlan) -> SavePlan:
    return (plan.whole or plan) if isinstance(plan, CachedSavePlan) else plan


def _shard_bytes_max(plan: SavePlan) -> int:
    objects = OBJECTS_BYTES_MAX if any(item.tensor_data is None for item in plan.items) else 0
    # Twice the planned bytes: a planner may write a wider type than it planned, as float32 for bfloat16.
    return _SHARD_BYTES_MIN + 2 * _tensor_bytes(plan) + len(plan.items) * _ITEM_BYTES_MAX + objects


def _tensor_bytes(plan: SavePlan) -> int:
    tensors = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors)
