"""Steps: saves with one planner that keeps plans from one to the next, between changes, loads and failures."""

from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from replicated_ckpt import CachedSavePlanner
from tests.multiprocess.cluster import Digests
from tests.multiprocess.context import Context
from tests.multiprocess.steps_state import build_all, digests_of, failure, load


class BreakingPlanner(CachedSavePlanner):
    """Raises while the shard is written, if it is told to."""

    breaks = False

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.breaks:
            raise RuntimeError("this rank breaks while it writes")
        return super().resolve_data(write_item)


def save_again_and_again(context: Context, saves: list[list[str]], breaks_at: int, forgets_at: int) -> dict[str, Any]:
    """Saves the kinds of each of `saves` as step-<n>, loading in between; rank 1 breaks the save `breaks_at`.

    Before `forgets_at` rank 0 gets a planner that knows nothing, and that save is repeated. Returns the digests of all
    that was saved, by id, and what was raised.
    """
    own = BreakingPlanner()
    planner: SavePlanner = own
    writer = context.writer()
    digests: dict[str, Digests] = {}
    raised: list[dict[str, Any]] = []
    for index, kinds in enumerate(saves):
        states = build_all(context, kinds, seed=index)
        own.breaks = index == breaks_at and context.rank == 1
        if index == forgets_at and context.rank == 0:
            planner = own = BreakingPlanner()
        for _ in range(2):
            try:
                dcp.save(dict(states), checkpoint_id=f"step-{index}", storage_writer=writer, planner=planner)
            except CheckpointException as error:
                raised.append({"save": index, **failure(error)})
                own.breaks = False
            else:
                break
        digests[f"step-{index}"] = digests_of(states)
        load(context, kinds, f"step-{index}")
    return {"digests": digests, "raised": raised}
