"""Steps: many saves and loads with new writers, readers and managers, some of which fail."""

import gc
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.errors import CheckpointNotFound
from tests.harness.processes import agent_of
from tests.steps.context import Context
from tests.steps.failing import FailingPlanner
from tests.steps.saving import footprint, resting_footprint

FAILING_EVERY = 5
SAVES_PAUSE_S = 0.3


def cycle(context: Context, count: int, measure_after: list[int]) -> list[dict[str, dict[str, int]]]:
    """Runs `count` times a save, a load, and a manager's save and load, each with new objects. Returns some footprints."""
    footprints = []
    for index in range(count):
        _save_and_load(context, index)
        _manage(context, index)
        if index % FAILING_EVERY == 0:
            _fail(context)
        if index + 1 in measure_after:
            footprints.append(_footprints(context))
    return footprints


def _state(context: Context, value: int) -> dict[str, torch.Tensor]:
    return {"all": torch.full((1000,), float(value)), f"rank{context.rank}": torch.full((1000,), float(value))}


def _save_and_load(context: Context, index: int) -> None:
    writer = ReplicatedWriter(context.root, overwrite=True)
    dcp.save(_state(context, index), checkpoint_id="own/last", storage_writer=writer)
    found = _state(context, -1)
    dcp.load(found, checkpoint_id="own/last", storage_reader=ReplicatedReader(context.root))
    assert all(float(value.mean()) == index for value in found.values())


def _manage(context: Context, index: int) -> None:
    with CheckpointManager(context.root, retention=Retention(keep_last=2)) as manager:
        manager.async_save(index, _state(context, index))
        assert manager.restore_latest(_state(context, -1)) == index


def _fail(context: Context) -> None:
    planner = FailingPlanner("write", fails_here=context.rank == context.world_size - 1)
    with pytest.raises(CheckpointException):
        dcp.save(
            {f"{context.rank} {key}": torch.ones(10) for key in range(3)},
            checkpoint_id="own/failing",
            storage_writer=ReplicatedWriter(context.root),
            planner=planner,
        )
    with pytest.raises((CheckpointException, CheckpointNotFound)):
        dcp.load(_state(context, 0), checkpoint_id="no-such", storage_reader=ReplicatedReader(context.root))


def _footprints(context: Context) -> dict[str, dict[str, int]]:
    gc.collect()
    found = {"rank": footprint(os.getpid())}
    if dist.is_initialized():
        found["rank"]["keys"] = dist.distributed_c10d._get_default_store().num_keys()
    if (context.root / ".agent" / "endpoint.json").exists():
        found["agent"] = resting_footprint(agent_of(context.root))
    return found


def save_until(context: Context, told: str) -> dict[str, list[Any]]:
    """Saves again and again until the file `told` exists. Returns the saved steps, and the errors and times of failed
    ones.

    Afterwards it restores each saved step.
    """
    saved: list[int] = []
    failed: list[str] = []
    with CheckpointManager(context.root) as manager:
        while not _is_told(told):
            step = 1 + len(saved) + len(failed)
            try:
                manager.save(step, _state(context, step))
                saved.append(step)
            except CheckpointException as exc:
                why = {rank: repr(wrapped[0]) for rank, wrapped in exc.failures.items()}
                failed.append(f"{datetime.now(tz=UTC):%H:%M:%S.%f} step {step}: {why}")
            time.sleep(SAVES_PAUSE_S)
        for step in saved:
            found = _state(context, -1)
            assert manager.restore(found, step) == step
            assert all(float(value.mean()) == step for value in found.values())
    return {"saved": saved, "failed": failed}


def _is_told(told: str) -> bool:
    """Whether the file exists. The result is the same on all ranks."""
    flag = torch.tensor(int(Path(told).exists()))
    dist.broadcast(flag, 0)
    return bool(flag)
