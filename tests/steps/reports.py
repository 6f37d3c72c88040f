"""Steps: reports of saves and loads to the user's callbacks and to the log."""

import logging
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from replicated_ckpt import LoadReport, ReplicatedReader, ReplicatedWriter, SaveReport, failpoints
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.config import Ack
from replicated_ckpt.core.timing import LATE
from replicated_ckpt.stores.local.store import LocalStore
from tests.steps.context import Context

ELEMENTS = 1 << 18


class FailingPlanner(dcp.DefaultLoadPlanner):
    """Fails after the ranks have planned, before this rank reads, with an error that cannot be pickled."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise type("Local", (RuntimeError,), {})("the plan")


class Lines(logging.Handler):
    """Keeps the package's INFO lines about saves and loads."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(("saved ", "loaded ")):
            self.lines.append(record.getMessage())


def save_async_telling(context: Context, ack: Ack) -> dict[str, Any]:
    """An asynchronous save. Returns this rank's report, and the log."""
    handler, logger = Lines(), logging.getLogger("replicated_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    writer = ReplicatedWriter(context.root, ack=ack)
    state = {f"rank {context.rank}": torch.full((ELEMENTS,), context.rank)}
    future = dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer)
    assert isinstance(future, Future)
    future.result(timeout=100)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    assert writer.last_save is not None
    return {"report": writer.last_save.as_dict(), "lines": handler.lines}


def save_and_load_telling(context: Context, checkpoint_id: str) -> dict[str, Any]:
    """A save, a failing save, a load, and a load that fails on rank 1. Returns the reports, and whether the checkpoint
    existed at each.
    """
    saved: list[dict[str, Any]] = []
    loaded: list[dict[str, Any]] = []

    def on_save(report: SaveReport) -> None:
        saved.append({**report.as_dict(), "there": (context.root / checkpoint_id / ".metadata").exists()})

    def on_load(report: LoadReport) -> None:
        loaded.append(report.as_dict())

    handler, logger = Lines(), logging.getLogger("replicated_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    state = {f"rank {context.rank}": torch.full((ELEMENTS,), context.rank)}
    writer = ReplicatedWriter(context.root, on_save=on_save, overwrite=False)
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
    is_refused = False
    try:
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
    except CheckpointException:
        is_refused = True
    other = {f"rank {1 - context.rank}": torch.zeros(ELEMENTS, dtype=torch.int64)}
    reader = ReplicatedReader(context.root, on_load=on_load, expect_partial=True)
    dcp.load(other, checkpoint_id=checkpoint_id, storage_reader=reader)
    planner = FailingPlanner() if context.rank == 1 else None
    failures: dict[str, str] = {}
    try:
        dcp.load(dict(other), checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
    except CheckpointException as exc:
        failures = {str(rank): type(error).__name__ for rank, (error, _) in exc.failures.items()}
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    same = torch.equal(other[f"rank {1 - context.rank}"], torch.full((ELEMENTS,), 1 - context.rank))
    found = {"saved": saved, "loaded": loaded, "lines": handler.lines, "is_refused": is_refused, "same": same}
    return {**found, "failures": failures}


SLOWED_S = 1.5
"""More than a busy machine delays a rank by, and less than the 5 s after which an agent counts as silent."""


class SlowPlanner(dcp.DefaultLoadPlanner):
    """Waits before it reads the first tensor."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        time.sleep(SLOWED_S)
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor


def save_and_load_slowed(context: Context, slow: int, hows: list[str]) -> None:
    """A save and a load for each of `hows`, the ways in which the rank `slow` or its agent is slowed."""
    writer, reader = ReplicatedWriter(context.root), ReplicatedReader(context.root)
    for number, how in enumerate(hows):
        name = f"step-{number}"
        state = {f"rank {context.rank}": torch.full((ELEMENTS,), number + context.rank)}
        with ExitStack() as stack:
            if context.rank == slow:
                _slow_down(how, context, stack)
            dcp.save(state, checkpoint_id=name, storage_writer=writer)
        planner = SlowPlanner() if (context.rank, how) == (slow, "read") else None
        dcp.load(state, checkpoint_id=name, storage_reader=reader, planner=planner)


def _slow_down(how: str, context: Context, stack: ExitStack) -> None:
    """Slows this rank, or its agent, until the stack is closed."""
    if how == LATE:
        time.sleep(SLOWED_S)
    elif how == "agent":
        stack.enter_context(failpoints.arm("rank.writing", partial(_stop_agent, context)))
    elif how in PLACES:
        stack.enter_context(failpoints.arm(PLACES[how], lambda _: time.sleep(SLOWED_S)))


PLACES = {"serialise": "rank.writing", "fsync": "store.shard-fsynced"}


def _stop_agent(context: Context, _: str) -> None:
    """Stops this node's agent for a moment while it receives copies or publishes the save."""
    endpoint = read_endpoint(LocalStore(context.root).agent_directory())
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGSTOP)
    threading.Timer(SLOWED_S, os.kill, (endpoint.pid, signal.SIGCONT)).start()
