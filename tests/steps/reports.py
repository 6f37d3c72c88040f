"""Steps: what the user's own functions, and the log, are told of saves and loads."""

import logging
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

from replicated_ckpt import LoadReport, ReplicatedReader, ReplicatedWriter, SaveReport
from replicated_ckpt.config import Ack
from tests.steps.context import Context

ELEMENTS = 1 << 18


class FailingPlanner(dcp.DefaultLoadPlanner):
    """Fails after the ranks have planned, before this one reads, with an error that pickle does not take."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise type("Local", (RuntimeError,), {})("the plan")


class Lines(logging.Handler):
    """Keeps what the package says at INFO of saves and loads."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(("saved ", "loaded ")):
            self.lines.append(record.getMessage())


def save_async_telling(context: Context, ack: Ack) -> dict[str, Any]:
    """An asynchronous save; what its report says on this rank, and the log."""
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
    """A save, one that fails, a load, and one that fails on rank 1; what was told, and if the checkpoint was there then."""
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
