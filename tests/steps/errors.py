"""Steps: one rank gets an error, or is killed, in a hook of a save or load. They return each rank's error, and after
how long.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import replicated_ckpt.dcp.find.rendezvous
import replicated_ckpt.dcp.load.load_attempt
import replicated_ckpt.dcp.save.commit
import replicated_ckpt.dcp.save.save_attempt
from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.agent.state.endpoint import root_lock
from replicated_ckpt.dcp.agreement.nodes import AgentCluster
from replicated_ckpt.dcp.find.survey import Survey, Surveyor
from replicated_ckpt.dcp.load.load_attempt import LoadAttempt
from replicated_ckpt.dcp.save.shard_writer import ShardWriter
from replicated_ckpt.stores.local.store import LocalStore
from tests.harness.launch import Call, call, step_of
from tests.harness.node import Node
from tests.steps.context import Context
from tests.steps.state import save_fails
from tests.stopwatch import Stopwatch

GROUP_WAIT = timedelta(seconds=12)
PLANNERS: Mapping[str, tuple[Any, str]] = {
    f"{what}: {step}": (planner, hook)
    for what, planner in (("save", DefaultSavePlanner), ("load", DefaultLoadPlanner))
    for step, hook in (
        ("set up planner", "set_up_planner"),
        ("plan items", "create_local_plan"),
        ("merge plans", "create_global_plan"),
    )
}
"""Hooks of the user's planner that DCP calls before or between those of the writer and the reader."""
PLACES: Mapping[str, tuple[Any, str]] = {
    **PLANNERS,
    "save: present": (replicated_ckpt.dcp.save.save_attempt, "register_for_save"),
    "save: open": (AgentCluster, "begin"),
    "save: number": (replicated_ckpt.dcp.save.save_attempt, "assign_sequence"),
    "save: weigh": (replicated_ckpt.dcp.save.save_attempt, "list_weaknesses"),
    "save: hold": (LocalStore, "lock_save"),
    "save: write": (ShardWriter, "begin_shard"),
    "save: written": (replicated_ckpt.dcp.save.save_attempt, "report_save"),
    "save: receipt": (replicated_ckpt.dcp.save.save_attempt, "register_again"),
    "save: post": (replicated_ckpt.dcp.save.save_attempt, "make_receipt_post"),
    "save: collect": (replicated_ckpt.dcp.save.save_attempt, "collect_receipts"),
    "save: finish": (replicated_ckpt.dcp.save.commit, "encode_metadata_file"),
    "load: reset": (ReplicatedReader, "reset"),
    "load: present": (replicated_ckpt.dcp.find.rendezvous, "register_for_load"),
    "load: look": (Surveyor, "survey"),
    "load: told": (Survey, "from_json"),
    "load: metadata": (replicated_ckpt.dcp.load.load_attempt, "read_verified_metadata"),
    "load: check": (LoadAttempt, "plan"),
    "load: plan": (replicated_ckpt.dcp.load.load_attempt, "plan_sharing"),
    "load: read": (LoadAttempt, "read_items"),
}
"""Where an error is met: what stands there is replaced while the save or load goes on."""


class Unsendable(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def _os_error(name: str) -> OSError:
    code = getattr(errno, name)
    return OSError(code, os.strerror(code), "/somewhere")


ERRORS: Mapping[str, Callable[[], BaseException]] = {
    **{name: partial(_os_error, name) for name in ("EROFS", "EMFILE", "ENOSPC", "EACCES", "EIO")},
    "MemoryError": MemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "Unsendable": lambda: Unsendable("this rank breaks", "a hook"),
}


@contextmanager
def failing(place: str, error: str, *, here: bool) -> Iterator[None]:
    def fail(*_: Any, **__: Any) -> None:
        if error == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        made = ERRORS[error]()
        raise made

    if not here:
        yield
        return
    with mock.patch.object(*PLACES[place], fail):
        yield


def _run(context: Context, place: str, process_group: Any) -> None:
    """The save or load that contains `place`."""
    if place.startswith("save"):
        state, writer = {f"r{context.rank}": torch.ones(1000)}, ReplicatedWriter(context.root, overwrite=True)
        dcp.save(state, checkpoint_id="broken", storage_writer=writer, process_group=process_group)
    else:
        load(context, "kept", process_group)


def save_kept(context: Context, process_group: Any = None) -> None:
    """Saves the checkpoint that these steps load."""
    state = {f"r{context.rank}": torch.full((1000,), float(context.rank + 1))}
    writer = ReplicatedWriter(context.root)
    dcp.save(state, checkpoint_id="kept", storage_writer=writer, process_group=process_group)


def load(context: Context, checkpoint_id: str, process_group: Any = None) -> list[float]:
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    state = {f"r{rank}": torch.zeros(1000) for rank in members}
    reader = ReplicatedReader(context.root)
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader, process_group=process_group)
    return [float(tensor.mean()) for tensor in state.values()]


def breaks(context: Context, place: str, error: str, rank: int, process_group: Any = None) -> dict[str, Any]:
    """`rank` gets `error` at `place`. Returns the error that this rank catches, its types, and after how long."""
    stopwatch = Stopwatch()
    try:
        with failing(place, error, here=context.rank == rank):
            _run(context, place, process_group)
    except BaseException as exc:  # noqa: BLE001 - the step returns the error
        told = {at: type(found).__name__ for at, (found, _) in exc.failures.items()} if hasattr(exc, "failures") else {}
        return {
            "seconds": stopwatch.stop(),
            "caught": type(exc).__name__,
            "told": told or {str(context.rank): type(exc).__name__},
            "text": str(exc),
        }
    raise AssertionError("the error was lost")


def breaks_in_group(context: Context, place: str, error: str, members: list[int], rank: int) -> dict[str, Any] | None:
    """Like `breaks`, in a group of some ranks. The others wait, and one of them serves the c10d store."""
    group, store = dist.new_group(members, backend="gloo"), dist.distributed_c10d._get_default_store()
    if context.rank not in members:
        store.wait(["caught"], GROUP_WAIT)
        return None
    found = breaks(context, place, error, rank, process_group=group)
    store.set("caught", "")
    return found


def breaks_in_turn(context: Context, cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """Runs one case after the other in one world. Returns what is staged after each. The world must still load after
    each.
    """
    found = []
    for place, error, rank in cases:
        outcome = breaks(context, place, error, rank)
        staged = sorted(path.name for root in context.roots for path in (root / ".staging").glob("*"))
        found.append({**outcome, "staged": staged})
        assert load(context, "kept") == [float(other + 1) for other in range(context.world_size)]
    return found


def timed(timed_call: Call[Any]) -> Call[dict[str, Any]]:
    """The same call, which returns its result as `value`, and its duration as `seconds`."""
    return call(run_timed, timed_call=timed_call.as_json())


def run_timed(context: Context, timed_call: dict[str, Any]) -> dict[str, Any]:
    """Runs another step, and measures its time."""
    step = step_of(timed_call)
    stopwatch = Stopwatch()
    value = step(context, **timed_call["arguments"])
    return {"value": value, "seconds": stopwatch.stop()}


def signal_agent(context: Context, node: int, number: int) -> None:
    """Sends a signal to a node's agent. All ranks continue once it has been sent."""
    if context.rank == 0:
        os.kill(Node(context.roots[node], context.roots[node]).agent_pid() or 0, number)
    dist.barrier()


def save_with_lock_held(context: Context, ranks: list[int]) -> dict[str, Any]:
    """Saves while an agent of the node is stopped in its start: it holds the root's lock, but never serves."""
    starting = stopped_at_its_start(context.root / ".agent") if context.rank == 0 else None
    dist.barrier()
    try:
        return save_fails(context, ["plain"], "step-2") if context.rank in ranks else {}
    finally:
        dist.barrier()
        if starting is not None:
            os.kill(starting, signal.SIGKILL)
            os.waitpid(starting, 0)


def stopped_at_its_start(directory: Path) -> int:
    """A process that holds the root's lock, and was stopped before it could answer."""
    pid = os.fork()
    if pid == 0:
        root_lock(directory)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(1)
    os.waitpid(pid, os.WUNTRACED)
    return pid
