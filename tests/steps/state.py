"""Steps: save a state, load one, and report the result."""

import dataclasses
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import ReplicatedCkptError
from tests.harness.cluster import Digests
from tests.steps.context import Context
from tests.steps.states import State, build
from tests.stopwatch import Stopwatch

OTHER_SEED = 90_000  # seed of the values before a load, which differ everywhere from the saved ones


def build_all(context: Context, kinds: list[str], seed: int) -> dict[str, State]:
    """States of these `kinds`, each under its own name. "name:kind" puts a kind under another name."""
    named = {name: kind or name for name, _, kind in (entry.partition(":") for entry in kinds)}
    return {name: build(kind, seed, context.rank, context.world_size) for name, kind in named.items()}


def digests_of(states: dict[str, State]) -> Digests:
    return {f"{kind}/{name}": value for kind, state in states.items() for name, value in state.digests().items()}


def report_of(report: object) -> dict[str, Any]:
    return dataclasses.asdict(report)  # type: ignore[call-overload, no-any-return]


def save(context: Context, /, kinds: list[str], checkpoint_id: str, seed: int = 0, **writer: Any) -> Digests:
    """Builds the states and saves them in one checkpoint. Returns their digests."""
    states = build_all(context, kinds, seed)
    dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=context.writer(**writer))
    return digests_of(states)


def save_report(context: Context, /, **writer: Any) -> dict[str, Any]:
    return report_of(context.writer(**writer).last_save)


def load(context: Context, /, kinds: list[str], checkpoint_id: str, **reader: Any) -> dict[str, Any]:
    """Loads into other values of the same kinds. Returns the digests of the loaded values, and the report."""
    states = build_all(context, kinds, OTHER_SEED)
    before = digests_of(states)
    storage_reader = context.reader(**reader)
    dcp.load(dict(states), checkpoint_id=checkpoint_id, storage_reader=storage_reader)
    after = digests_of(states)
    assert before.keys() == after.keys()
    return {"digests": after, "report": report_of(storage_reader.last_load)}


def load_and_save(context: Context, kinds: list[str], checkpoint_id: str, as_id: str) -> Digests:
    """Loads a checkpoint, and saves the loaded values under another id."""
    states = build_all(context, kinds, OTHER_SEED)
    dcp.load(dict(states), checkpoint_id=checkpoint_id, storage_reader=context.reader())
    dcp.save(dict(states), checkpoint_id=as_id, storage_writer=context.writer())
    return digests_of(states)


def load_partly(context: Context, kinds: list[str], checkpoint_id: str, *, is_allowed: bool) -> dict[str, Any]:
    """Loads a checkpoint that has only some of `kinds`. Returns the values before and afterwards, or the error."""
    states = build_all(context, kinds, OTHER_SEED)
    before = digests_of(states)
    planner = DefaultLoadPlanner(allow_partial_load=is_allowed)
    try:
        dcp.load(dict(states), checkpoint_id=checkpoint_id, storage_reader=context.reader(), planner=planner)
    except CheckpointException as exc:
        return failure(exc)
    new = {name: value for name, value in before.items() if not name.startswith(f"{kinds[0]}/")}
    return {"after": digests_of(states), "new": new}


def load_integers(context: Context, sizes: dict[str, int], checkpoint_id: str, kind: str) -> dict[str, int]:
    """Loads int64 vectors by their names within `kind` on every rank. Each is 0, 1, 2... times its result."""
    wanted = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    dcp.load({kind: wanted}, checkpoint_id=checkpoint_id, storage_reader=context.reader())
    for name, tensor in wanted.items():
        assert torch.equal(tensor, torch.arange(sizes[name]) * tensor[1]), name
    return {name: int(tensor[1]) for name, tensor in wanted.items()}


def load_fails(context: Context, kinds: list[str], checkpoint_id: str) -> dict[str, Any]:
    """A load that must fail. Returns the error, its ranks, and after how long."""
    stopwatch = Stopwatch()
    try:
        load(context, kinds, checkpoint_id)
    except (CheckpointException, ReplicatedCkptError) as exc:
        return {"seconds": stopwatch.stop(), **failure(exc)}
    raise AssertionError("the load should have failed")


def save_fails(
    context: Context, /, kinds: list[str], checkpoint_id: str, seed: int = 0, **writer: Any
) -> dict[str, Any]:
    """A save that must fail. Returns the error."""
    stopwatch = Stopwatch()
    try:
        save(context, kinds, checkpoint_id, seed, **writer)
    except (CheckpointException, ReplicatedCkptError) as exc:
        return {"seconds": stopwatch.stop(), **failure(exc)}
    raise AssertionError("the save should have failed")


def failure(exc: BaseException) -> dict[str, Any]:
    """An error as a value: the error that this rank caught, and the ranks whose errors it contains."""
    raised = {rank: error for rank, (error, _) in exc.failures.items()} if isinstance(exc, CheckpointException) else {}
    first = next(iter(raised.values()), exc)
    facts = {
        name: getattr(first, name)
        for name in ("shards", "owner_by_shard", "searched", "id_by_rank")
        if hasattr(first, name)
    }
    return {
        "caught": type(exc).__name__,
        "ranks": sorted(raised),
        "types": sorted({type(error).__name__ for error in raised.values()} or {type(exc).__name__}),
        "message": str(first),
        "notes": getattr(first, "__notes__", []),
        "hint": getattr(first, "hint", ""),
        **facts,
    }
