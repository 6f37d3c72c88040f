"""Steps: ranks of one node load the same bytes, and one of them stops, fails, or agrees to more than it reads."""

import os
import subprocess
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.stores.node_cache import patience
from tests.multiprocess.context import Context
from tests.multiprocess.steps_peers import pieces
from tests.multiprocess.steps_state import failure, report_of


class TimedReader(ReplicatedReader):
    """Takes the time of what a rank reads by itself, before DCP has all ranks wait for each other."""

    seconds = 0.0

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        started = time.monotonic()
        try:
            return super().read_data(plan, planner)
        finally:
            self.seconds = time.monotonic() - started


class TroubledPlanner(DefaultLoadPlanner):
    """On one rank something happens: it raises before it reads or while it reads, stops, or drops half of its plan."""

    def __init__(self, trouble: str, stop_s: float) -> None:
        super().__init__()
        self._trouble = trouble
        self._stop_s = stop_s
        self._resolved = 0

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        if self._trouble == "drops":  # of the coordinator's own plan, after the readers have seen it
            plans[0] = replace(plans[0], items=plans[0].items[::2])
        return plans

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        if self._trouble == "raises before":
            raise RuntimeError("this rank breaks before it reads")
        return super().finish_plan(central_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._resolved += 1
        if self._resolved == 3 and self._trouble == "raises":
            raise RuntimeError("this rank breaks while it reads")
        if self._resolved == 3 and self._trouble == "stops":
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {self._stop_s}; kill -CONT {pid}"])
            time.sleep(0.2)  # until it is stopped
        found: torch.Tensor = super().resolve_tensor(read_item)
        return found


def load_with_trouble(
    context: Context,
    checkpoint_id: str,
    count: int,
    ranks: int,
    trouble: str,
    at: int,
    patience_s: float,
    stop_s: float = 0.0,
) -> dict[str, Any]:
    """Loads the pieces of all ranks that saved; rank `at` has trouble. Says how it went here, and how long it read.

    Ranks that read wait for `patience_s` for each other.
    """
    patience.PATIENCE_S = patience_s
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = TimedReader(context.root)
    planner = TroubledPlanner(trouble if context.rank == at else "", stop_s)
    try:
        dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
    except CheckpointException as exc:
        return {"seconds": reader.seconds, **failure(exc)}
    return {
        "same": [torch.equal(found[name], wanted[name]) for name in wanted],
        "report": report_of(reader.last_load),
        "seconds": reader.seconds,
    }
