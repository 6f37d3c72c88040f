"""Steps: ranks of one node load the same bytes. One stops, fails, or agrees to too much. Also what saves send only
once.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.c10d import blackboard, world
from replicated_ckpt.dcp.c10d.blackboard import CachedDecisions
from replicated_ckpt.stores.node_cache import exchange as exchanging
from tests.steps.context import Context
from tests.steps.peers import pieces
from tests.steps.state import build_all, failure, report_of
from tests.stopwatch import Stopwatch

STOPPED_MAX_S = 60.0


class TimedReader(ReplicatedReader):
    """Measures how long a rank reads by itself, before DCP makes all ranks wait for each other."""

    seconds = elapsed_s = 0.0
    """Without the time in which this rank, or the machine, stood still; and with it."""
    note: Path | None = None
    """Made once it has read, if a rank waits for that."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        started, stopwatch = time.monotonic(), Stopwatch()
        try:
            return super().read_data(plan, planner)
        finally:
            self.seconds, self.elapsed_s = stopwatch.stop(), time.monotonic() - started
            if self.note is not None:
                self.note.touch()


class TroubledPlanner(DefaultLoadPlanner):
    """Causes trouble on one rank: it raises before or while it reads, stops, or drops half of its plan.

    A stopped rank continues when the files `until` exist, or after STOPPED_MAX_S.
    """

    def __init__(self, trouble: str, until: Sequence[Path]) -> None:
        super().__init__()
        self._trouble = trouble
        self._until = until
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
            pid, tries = os.getpid(), int(STOPPED_MAX_S / 0.1)
            are_there = " && ".join(f"test -e {path}" for path in self._until)
            waits = f"for _ in $(seq {tries}); do {are_there} && break; sleep 0.1; done"
            subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; {waits}; kill -CONT {pid}"])
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
    wait_s: float,
) -> dict[str, Any]:
    """Loads the pieces of all ranks that saved. Rank `at` has trouble. Returns this rank's outcome, and how long it
    read.

    A stopped rank continues when the others have read everything. Readers wait up to `wait_s` for each other.
    """
    exchanging.STALL_TIMEOUT_S = wait_s
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = TimedReader(context.root)
    notes = [context.roots[0].parent / f"rank-{rank}-has-read" for rank in range(context.world_size)]
    reader.note = notes[context.rank] if trouble == "stops" else None
    planner = TroubledPlanner(trouble if context.rank == at else "", [*notes[:at], *notes[at + 1 :]])
    try:
        dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
    except CheckpointException as exc:
        return {"seconds": reader.seconds, **failure(exc)}
    return {
        "same": [torch.equal(found[name], wanted[name]) for name in wanted],
        "report": report_of(reader.last_load),
        "seconds": reader.seconds,
        "elapsed_s": reader.elapsed_s,
    }


def save_as_in_a_large_job(context: Context, kinds: list[str], times: int, forgets_at: int) -> list[int]:
    """Saves with new writers, and with decisions that count as large. Returns the bytes of each decision that this rank
    read.

    Before the save `forgets_at`, the last rank forgets its earlier decisions.
    """
    read: list[int] = []

    class Counting(CachedDecisions):
        def complete(self, topic: str, raw: bytes, fields: dict[str, Any]) -> dict[str, Any]:
            read.append(len(raw))
            return super().complete(topic, raw, fields)

    with (
        mock.patch.object(blackboard, "PACKED_FROM_BYTES", 256),
        mock.patch.object(world, "CachedDecisions", Counting),
        mock.patch.dict(world._cached_by_group, clear=True),
    ):
        for number in range(times):
            if number == forgets_at and context.rank == dist.get_world_size() - 1:
                world._cached_by_group.clear()
            state = dict(build_all(context, kinds, number))
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=ReplicatedWriter(context.root))
    return read
