"""Saves with retention, in turn over recycled files and into new ones, with everything else equal."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.rank.cost import measured
from benchmarks.rank.rounds import Taken, built, shuffled, take, total
from benchmarks.rank.ways import agent_root, is_first_of_node, write_back
from replicated_ckpt import CachedSavePlanner, ReplicatedWriter, Retention
from replicated_ckpt.core.layout import RECYCLED_DIR
from tests.steps.context import Context

RECYCLED, NEW = "recycled files", "new files"
_WARM_SAVES = 2
_RETIRED_TIMEOUT_S, _POLL_S = 60.0, 0.01


class Keeping:
    """A job that keeps its newest checkpoint. Without `recycles` a file in place of the pool's directory prevents
    recycling.
    """

    def __init__(self, context: Context, *, recycles: bool, copies: int) -> None:
        self.context = context
        if is_first_of_node() and not recycles:
            (self.context.root / RECYCLED_DIR).touch()
        dist.barrier()
        self._writer = ReplicatedWriter(self.context.root, copies=copies, retention=Retention(keep_last=1))
        self._planner = CachedSavePlanner()
        self._saves = 0

    def save(self, values: dict[str, Any]) -> None:
        self._saves += 1
        name = f"step-{self._saves}"
        dcp.save(values, checkpoint_id=name, storage_writer=self._writer, planner=self._planner)

    def settle(self) -> None:
        """Waits until the previous checkpoint is removed."""
        deadline = time.monotonic() + _RETIRED_TIMEOUT_S
        root = self.context.root
        while len(list(root.glob("step-*"))) > 1 or any(root.glob(".trash/*")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{root} has more than one checkpoint after {_RETIRED_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)


def save_in_turn(context: Context, size_bytes: int, rounds: int, copies: int, other_roots: list[str]) -> dict[str, Any]:
    """Rank 0 returns the samples, by way, of the third save and the later ones. New files are in the other roots."""
    other = replace(context, roots=[Path(root) for root in other_roots])
    jobs = {
        RECYCLED: Keeping(context, recycles=True, copies=copies),
        NEW: Keeping(other, recycles=False, copies=copies),
    }
    state = built(context, "fsdp2", size_bytes)
    taken: Taken = {}
    for number in range(_WARM_SAVES + rounds):
        for name in shuffled(list(jobs), number):
            job = jobs[name]
            state.train()
            if is_first_of_node():
                write_back(job.context.root.parent)
            sample = measured(partial(job.save, state.values), job.settle, agent_root(job.context))
            if number >= _WARM_SAVES:
                take(taken, name, sample)
    return {"taken": taken, "state_bytes": total(state)}
