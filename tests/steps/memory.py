"""Steps: a CheckpointManager with a memory tier. The context's roots are all disks, followed by all memory tiers."""

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, Retention
from replicated_ckpt.dcp.steps import id_of
from replicated_ckpt.errors import ReplicatedCkptError
from tests.harness.processes import agent_of
from tests.steps.context import Context
from tests.steps.saving import resting_footprint

MEET_S = 60.0
FIRST_STEPS = 3
"""So many are saved before a node may die."""
UNSAVED = -1
"""What a state holds before a step is restored."""


def _root(context: Context) -> Path:
    """The memory root of this rank's node."""
    return context.roots[len(context.roots) // 2 + context.node]


def _manager(context: Context, /, disk_every: int, **options: Any) -> CheckpointManager:
    return CheckpointManager(context.root, memory=_root(context), disk_every=disk_every, **options)


def _state(context: Context, step: float, numbers: int = 1000) -> dict[str, Any]:
    """A state of which each rank has its own part, and all ranks have a common one."""
    return {f"own {context.rank}": torch.full((numbers,), float(step)), "all": torch.full((7,), float(step))}


def train(
    context: Context,
    /,
    steps: list[int],
    disk_every: int,
    die_after: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Restores, then saves these steps. Each save begins once the previous one is in the buddy's memory.

    `die_after`: the rank is killed once this step is in the buddy's memory.
    """
    with _manager(context, disk_every, **options) as manager:
        restored = manager.restore(_state(context, UNSAVED))
        for step in steps:
            state = _state(context, step)
            manager.async_save(step, state)
            for value in state.values():
                value.zero_()  # the copy is what is saved
            manager.wait()
            if step == die_after:
                _await_others(context, step)
                os.kill(os.getpid(), signal.SIGKILL)
        return {"restored": restored, **_seen(manager)}


def train_whatever(context: Context, steps: list[int], disk_every: int) -> list[str]:
    """Saves these steps, each after the end of the previous one. Returns after which of them `wait` raised that it had
    failed.
    """
    failed = []
    with _manager(context, disk_every) as manager:
        for step in steps:
            manager.async_save(step, _state(context, step))
            try:
                manager.wait()
            except ReplicatedCkptError:
                failed.append(id_of(step))
            _await_others(context, step)
    return failed


def _await_others(context: Context, step: int) -> None:
    """Waits until every rank is here. It uses files, because the process group ends with the first killed rank."""
    place, launch = _root(context).parent, os.environ["MASTER_PORT"]
    (place / f"ready{launch}-{step}-{context.rank}").touch()
    deadline = time.monotonic() + MEET_S
    while len(list(place.glob(f"ready{launch}-{step}-*"))) < context.world_size:
        assert time.monotonic() < deadline, f"not all ranks have come to step {step}"
        time.sleep(0.01)


def _seen(manager: CheckpointManager) -> dict[str, Any]:
    return {"steps": list(manager.all_steps()), "latest": manager.latest_step()}


def restore(context: Context, disk_every: int, wanted: int | None = None) -> dict[str, Any]:
    """Restores like a new job. Returns the values of the state, and the report of the load, which shows where the bytes
    came from.
    """
    state = _state(context, UNSAVED)
    with _manager(context, disk_every) as manager:
        seen = _seen(manager)
        found = manager.restore(state, wanted)
        report = manager.last_load
    values = sorted({float(number) for value in state.values() for number in value.unique()})
    sources = {} if report is None else {"local": report.bytes_local, "peer": report.bytes_peer}
    return {"found": found, "values": values, **seen, **sources}


def delete(context: Context, disk_every: int, wanted: int) -> list[Any]:
    """Deletes a step twice. Returns the remaining steps."""
    with _manager(context, disk_every) as manager:
        return [manager.delete(wanted), manager.delete(wanted), *manager.all_steps()]


def refuse(context: Context, disk_every: int, number: int, numbers: int) -> list[str]:
    """A save that is too large for the tier. Returns this rank's error, and the checkpoints afterwards."""
    with _manager(context, disk_every, ack="peer") as manager:
        said = []
        try:
            manager.save(number, {f"own {context.rank}": torch.empty(numbers)})  # memory that nothing touches
        except CheckpointException as exc:
            said.append(str(exc))
        return [*said, *map(id_of, manager.all_steps())]


def train_on(context: Context, disk_every: int, node: int, delay_s: float) -> None:
    """Saves steps without a pause, and records each acknowledged one. One node dies after a while."""
    noted = _root(context).parent / f"acknowledged{context.rank}"
    with _manager(context, disk_every, ack="peer") as manager:
        step = manager.restore(_state(context, UNSAVED)) or 0
        while True:
            step += 1
            manager.save(step, _state(context, step))
            noted.write_text(str(step))
            if step == FIRST_STEPS and context.node == node:
                threading.Timer(delay_s, _die, [context]).start()


def train_until_killed(context: Context, disk_every: int, delay_s: float) -> None:
    """Like a restarted job: restores the acknowledged step or a newer one, then saves until all are killed."""
    noted = _root(context).parent / f"acknowledged{context.rank}"
    before = [int(path.read_text()) for path in noted.parent.glob("acknowledged?")]
    state = _state(context, UNSAVED)
    with _manager(context, disk_every) as manager:
        step = manager.restore(state) or 0
        assert step >= max(before, default=0), f"step {step} was restored, and {before} were acknowledged"
        assert step == 0 or all(bool((value == step).all()) for value in state.values()), state
        threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
        while True:
            step += 1
            manager.async_save(step, _state(context, step))  # returns once the one before is acknowledged
            if step > 1:
                replacement = noted.with_suffix(".new")
                replacement.write_text(str(step - 1))
                replacement.rename(noted)


def _die(context: Context) -> None:
    """Dies with the agents of this node, as at a power loss."""
    for root in (context.root, _root(context)):
        os.kill(agent_of(root), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def save_many(context: Context, count: int, size_bytes: int, measure_after: list[int], is_tiered: bool) -> list[Any]:
    """Asynchronous saves in a row. Returns the footprint of this rank and of its node's agents after some of them."""
    roots = [context.root, _root(context)] if is_tiered else [context.root]
    tier = roots[1] if is_tiered else None
    found = []
    with CheckpointManager(context.root, memory=tier, retention=Retention(keep_last=2), preempt_on=()) as manager:
        state = {f"own {context.rank}": torch.zeros(size_bytes // 4 // context.world_size)}
        for step in range(1, count + 1):
            state[f"own {context.rank}"].fill_(step)
            manager.async_save(step, state)
            if step in measure_after:
                manager.wait()
                gc.collect()
                agents = {f"agent of {root.name}": resting_footprint(agent_of(root)) for root in roots}
                found.append({"rank": resting_footprint(os.getpid()), **agents})
    return found
