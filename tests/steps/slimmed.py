"""Steps: checkpoints of a model and an optimizer, and loads of older ones."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import OptimizerDropped, Retention
from replicated_ckpt.stores.local.store import LocalStore
from tests.steps.context import Context

_POLL_S = 0.1


def build(context: Context, seed: int, size: int) -> dict[str, Any]:
    """Each rank has its own tensors: one of the model, and two of the same size of the optimizer."""
    generator = torch.Generator().manual_seed(1000 * seed + context.rank)
    weight, first, second = (torch.rand(size, generator=generator) for _ in range(3))
    own = f"w{context.rank}"
    return {"model": {own: weight}, "optim": {"state": {own: {"exp_avg": first, "exp_avg_sq": second}}}, "step": seed}


def save_all(context: Context, /, steps: list[int], size: int, keep_last: int, full_last: int | None) -> None:
    policy = Retention(keep_last=keep_last, full_last=full_last)
    for step in steps:
        writer = context.writer(retention=policy)
        dcp.save(build(context, step, size), checkpoint_id=f"step-{step}", storage_writer=writer)


def await_full(context: Context, /, steps: list[int], within_s: float) -> list[int]:
    """Waits until exactly these steps are full on this node. Returns the full steps."""
    store, deadline = LocalStore(context.root), time.monotonic() + within_s
    while True:
        found = sorted(manifest.sequence for _, manifest in store.catalog.committed() if not manifest.is_slim)
        if found == steps or time.monotonic() > deadline:
            return found
        time.sleep(_POLL_S)


def load_weights(context: Context, /, steps: list[int], size: int) -> list[bool]:
    """Whether the model of each step loads bit for bit."""
    right = []
    for step in steps:
        wanted, found = build(context, step, size)["model"], build(context, 99, size)["model"]
        reader = context.reader(expect_partial=True)
        dcp.load({"model": found}, checkpoint_id=f"step-{step}", storage_reader=reader)
        right.append(all(torch.equal(found[name], value) for name, value in wanted.items()))
    return right


def load_all(context: Context, /, of: int, size: int, only_on: int | None = None) -> Any:
    """True if all of a step loads bit for bit, otherwise the errors of the ranks. `only_on`: other ranks load less."""
    wanted, found = build(context, of, size), build(context, 99, size)
    if only_on not in (None, context.rank):
        wanted.pop("optim"), found.pop("optim")
    try:
        dcp.load(found, checkpoint_id=f"step-{of}", storage_reader=context.reader(expect_partial=True))
    except (CheckpointException, OptimizerDropped) as exc:
        failures = [exc] if isinstance(exc, OptimizerDropped) else [failure for failure, _ in exc.failures.values()]
        return sorted({(type(each).__name__, getattr(each, "newest_full", "")) for each in failures})
    own = f"w{context.rank}"
    same = torch.equal(found["model"][own], wanted["model"][own])
    moments = wanted.get("optim", {"state": {own: {}}})["state"][own]
    return same and all(torch.equal(found["optim"]["state"][own][name], value) for name, value in moments.items())


def load_with_stock_torch(context: Context, /, folder: str, of: int, size: int) -> bool:
    """Whether stock torch's own reader loads this rank's part of the model from a directory."""
    wanted, found = build(context, of, size)["model"], build(context, 99, size)["model"]
    dcp.load({"model": found}, storage_reader=dcp.FileSystemReader(Path(folder)), no_dist=True)
    return all(torch.equal(found[name], value) for name, value in wanted.items())
