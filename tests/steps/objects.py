"""Steps: saves to an object store, waits for the uploads, and loads from the bucket."""

import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.errors import ReplicatedCkptError, UploadFailed
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from tests.steps.context import Context
from tests.steps.loss import kill_agent_of
from tests.steps.network import ActingPlanner
from tests.steps.peers import pieces
from tests.steps.state import OTHER_SEED, build_all, digests_of, failure, report_of
from tests.stopwatch import Stopwatch

Where = Mapping[str, Any]  # object_store and storage_options


def save(context: Context, /, checkpoint_id: str, count: int, where: Where, seed: int = 1, **writer: Any) -> float:
    """Saves pieces of one MiB, `count` of each rank. Returns the seconds until `dcp.save` returned."""
    state = pieces(context.rank, count, seed)
    storage_writer = context.writer(**where, **writer)
    stopwatch = Stopwatch()
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=storage_writer)
    return stopwatch.stop()


def wait(context: Context, /, where: Where, timeout_s: float = 60.0, **writer: Any) -> list[str]:
    """Calls `wait` of the writer that saved. Returns the ids that are in the bucket now."""
    return list(context.writer(**where, **writer).wait(timeout_s))


def wait_fails(context: Context, /, where: Where, timeout_s: float, **writer: Any) -> dict[str, Any]:
    """Calls `wait`, which must fail. Returns the error, and after how many seconds."""
    stopwatch = Stopwatch()
    try:
        context.writer(**where, **writer).wait(timeout_s)
    except UploadFailed as exc:
        return {"seconds": stopwatch.stop(), **failure(exc)}
    raise AssertionError("wait should have failed")


def pause(context: Context, folder: str) -> None:
    """Creates the file `reached`, and waits for the file `go`."""
    del context
    (Path(folder) / "reached").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)


def load(
    context: Context, /, checkpoint_id: str, count: int, ranks: int, seed: int = 1, **options: Any
) -> dict[str, Any]:
    """Loads the pieces of all ranks that saved into other values, and compares every bit. The options may say
    `rootless`.
    """
    reader = reader_of(context, **options)
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, seed).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    return {"same": same, "report": report_of(reader.last_load)}


def load_fails(context: Context, /, checkpoint_id: str, count: int, ranks: int, **options: Any) -> dict[str, Any]:
    """A load that must fail. Returns the error. Each tensor must hold its saved or its old values."""
    reader = reader_of(context, **options)
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    try:
        dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
    except (CheckpointException, ReplicatedCkptError) as exc:
        is_clean = all(torch.equal(found[name], wanted[name]) or not found[name].any() for name in wanted)
        return {"is_clean": is_clean, **failure(exc)}
    raise AssertionError("the load should have failed")


def load_fails_midway(
    context: Context, /, checkpoint_id: str, count: int, ranks: int, folder: str, wait_s: float, **options: Any
) -> dict[str, Any]:
    """Like `load_fails`, but rank 0 pauses at its first item. No read waits for the bucket longer than `wait_s`."""
    planner = ActingPlanner(int(context.rank == 0), partial(pause, context, folder))
    found = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 2).items()}
    stopwatch = Stopwatch()
    with mock.patch.dict(RetryingClient.__init__.__kwdefaults__ or {}, within_s=wait_s):
        try:
            dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader_of(context, **options), planner=planner)
        except CheckpointException as exc:
            return {"seconds": stopwatch.stop(), **failure(exc)}
    raise AssertionError("the load should have failed")


def load_kinds(context: Context, /, kinds: list[str], checkpoint_id: str, **options: Any) -> dict[str, Any]:
    """Loads states of these kinds into other values. Returns the digests of the loaded values, and the report."""
    states = build_all(context, kinds, OTHER_SEED)
    reader = reader_of(context, **options)
    dcp.load(dict(states), checkpoint_id=checkpoint_id, storage_reader=reader)
    return {"digests": digests_of(states), "report": report_of(reader.last_load)}


def reader_of(context: Context, where: Where | None = None, *, rootless: bool = False) -> ReplicatedReader:
    """A reader with a bucket, or without one. `rootless`: without a store on this node."""
    if not rootless:
        return context.reader(**(where or {}))
    group = dist.group.WORLD if dist.is_initialized() else None
    return ReplicatedReader(process_group=group, **(where or {}))


def kill_agent_in_upload(context: Context, after_s: float) -> bool:
    """Kills this node's agent `after_s` into an upload. Returns whether the upload was unfinished."""
    time.sleep(after_s)
    kill_agent_of(context.root)
    return bool(json.loads((context.root / ".agent" / "uploads.json").read_text())["begun"])
