"""The announcement of a save: upper bounds of its bytes, from the plans that DCP has made for all ranks."""

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.protocol.announced import NOTHING_ANNOUNCED, Announced
from replicated_ckpt.dcp.planning.kept_plan import KeptPlan

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
    plans = [(plan.whole or plan) if isinstance(plan, KeptPlan) else plan for plan in plans]
    if not all(getattr(plan, "usable", True) for plan in plans):  # torch 2.6 keeps none back, and has no such field
        return NOTHING_ANNOUNCED
    sizes = [_shard_bytes_max(plan) for plan in plans]
    return Announced(max(sizes, default=0), sum(sizes))


def _shard_bytes_max(plan: SavePlan) -> int:
    tensors, has_objects = 0, False
    for item in plan.items:
        if item.tensor_data is None:
            has_objects = True
        else:
            tensors += math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    objects = OBJECTS_BYTES_MAX if has_objects else 0
    return _SHARD_BYTES_MIN + 2 * tensors + len(plan.items) * _ITEM_BYTES_MAX + objects
