"""Steps: one of many ranks ends, or leaves, in the middle of a save or load. They return the others' errors, and what
works afterwards.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt import CheckpointManager, ReplicatedWriter
from replicated_ckpt.dcp.c10d import blackboard, waiting
from replicated_ckpt.dcp.c10d.world import watch_group
from tests.steps import state
from tests.steps.context import Context
from tests.steps.errors import breaks, load, save_kept
from tests.steps.load_faults import await_others
from tests.steps.state import failure
from tests.stopwatch import Stopwatch

_INTERRUPT_EVERY_S = 2.0
_SETTLED_WITHIN_S = 5.0
_GROUP_S = 5.0
_SAY_AFTER_S = 5.0


def breaks_among_many(
    context: Context, place: str, error: str, rank: int, *, members: list[int], are_seen: bool = True
) -> dict[str, Any] | None:
    """Like `errors.breaks`, among the ranks `members`. Each stays until all remaining ones have their error.

    `are_seen`: ranks see the processes of their host. Otherwise each is as if alone on a host.
    """
    with mock.patch.object(waiting, "_BOOT_ID", waiting._BOOT_ID if are_seen else Path("/nowhere")):
        group = dist.new_group(members, backend="gloo")
        if context.rank not in members:
            await_others(context.roots[0].parent, context.rank, len(members))
            return None
        save_kept(context, group)
        found = breaks(context, place, error, rank, process_group=group)
        if context.rank != rank:
            found["staged"] = _staged_once_settled(context)
        await_others(context.roots[0].parent, context.rank, len(members))
        return found


def waits_for_late(context: Context, verb: str, late: int) -> list[str]:
    """A save or load that rank `late` calls once another rank's log has named it. Returns this rank's log.

    `verb` "manager": creates a manager, whose ranks acquire a process group.
    """
    logged: list[str] = []
    come = context.roots[0].parent / f"{verb}-{late}"

    class Naming(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            come.touch()

    handler = Naming(logging.WARNING)
    logger = logging.getLogger(blackboard.__name__)
    logger.addHandler(handler)
    try:
        with mock.patch.object(blackboard, "LOG_AFTER_S", _SAY_AFTER_S):
            while context.rank == late and not come.exists():
                time.sleep(0.05)
            match verb:
                case "save":
                    state.save(context, ["plain"], "step-1")
                case "load":
                    state.load(context, ["plain"], "step-1")
                case "manager":
                    with CheckpointManager(context.root):
                        pass
    finally:
        logger.removeHandler(handler)
    return logged


def _staged_once_settled(context: Context) -> list[str]:
    """Staged files on all nodes, after agents have had time to remove saves that no rank holds."""
    deadline = time.monotonic() + _SETTLED_WITHIN_S
    while (left := _staged(context)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _staged(context: Context) -> list[str]:
    return sorted(path.name for root in context.roots for path in (root / ".staging").glob("*"))


class InterruptedPlanner(DefaultSavePlanner):
    """Sends SIGINT to rank 0 while it waits for rank `slow`, which plans until rank 0 has raised the interrupt."""

    def __init__(self, context: Context, slow: int, told: Path) -> None:
        super().__init__()
        self._rank, self._slow, self._told = context.rank, slow, told

    def create_local_plan(self) -> SavePlan:
        if self._rank == 0:
            threading.Thread(target=self._interrupt, daemon=True).start()
        while self._rank == self._slow and not self._told.exists():
            time.sleep(0.01)
        return super().create_local_plan()

    def _interrupt(self) -> None:
        """Interrupts repeatedly: an interrupt before this rank waits is only an error of its planning."""
        while True:
            time.sleep(_INTERRUPT_EVERY_S)
            if self._told.exists():
                return
            os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_while_it_waits(context: Context, slow: int) -> list[dict[str, Any]]:
    """Returns each rank's error, its error in the next save of the same group, and whether a save in a new group
    succeeds.
    """
    told, found, group = context.roots[0].parent / "told", [], dist.new_group(backend="gloo")
    save_kept(context)
    for checkpoint_id, planner in (("interrupted", InterruptedPlanner(context, slow, told)), ("again", None)):
        stopwatch = Stopwatch()
        try:
            with _interruptible():
                _save(context, checkpoint_id, group, planner)
        except BaseException as exc:  # noqa: BLE001 - the step returns the error
            found.append({**failure(exc), "seconds": stopwatch.stop()})
        told.touch()
    _save(context, "saved", None)
    return [*found, {"loaded": load(context, "saved"), "staged": _staged(context)}]


def _save(context: Context, checkpoint_id: str, group: Any, planner: DefaultSavePlanner | None = None) -> None:
    state = {f"r{context.rank}": torch.full((1000,), float(context.rank + 1))}
    writer = ReplicatedWriter(context.root)
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=group, planner=planner)


def stops_among_many(context: Context, stopped: int) -> dict[str, Any]:
    """Rank `stopped` stops itself while the others wait for it. Returns each rank's error, and the id of the stopped
    process.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_GROUP_S))
    watched, told = watch_group(group), context.roots[0].parent / "stopped"
    watched.all_gather_object(None)
    if context.rank == stopped:
        told.write_text(str(os.getpid()))
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return {}
    try:
        watched.all_gather_object(None)
    except CheckpointException as exc:
        found = failure(exc)
    pid = int(told.read_text())
    await_others(context.roots[0].parent, context.rank, context.world_size - 1)
    os.kill(pid, signal.SIGCONT)
    return {**found, "pid": pid}


def take_turns_with_torch(context: Context) -> list[dict[str, Any]]:
    """Runs each collective while one rank calls torch's own and the others call ours, in turn. Returns this rank's
    results.
    """
    ours, size, value = watch_group(dist.group.WORLD), context.world_size, "x" * 10 ** (context.rank + 1)
    is_first, given = context.rank == 0, [f"{rank}" * 3**rank for rank in range(size)]
    found = []
    for stock in range(size):
        gathered: list[Any] | None = [""] * size
        everywhere, scattered, told = [""] * size, [""], [value]
        if context.rank == stock:
            dist.gather_object(value, gathered if is_first else None)
            dist.scatter_object_list(scattered, given if is_first else None)
            dist.broadcast_object_list(told)
            dist.all_gather_object(everywhere, value)
        else:
            gathered = ours.gather_object(value)
            scattered = [ours.scatter_object(given if is_first else None)]
            told = [ours.broadcast_object(value)]
            everywhere = ours.all_gather_object(value)
        lengths = {"everywhere": [len(one) for one in everywhere], "told": len(told[0])}
        found.append({"scattered": scattered, **lengths, "is_all_gathered": not is_first or gathered == everywhere})
    return found
