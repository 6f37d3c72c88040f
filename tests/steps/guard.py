"""Steps: a job that always fails after its restore; and rejected steps."""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from replicated_ckpt import CheckpointManager
from tests.steps.context import Context


def _state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step)), "step": step}


def save(context: Context, steps: list[int], copies: int = 2) -> None:
    with CheckpointManager(context.root, copies=copies, preempt_on=()) as manager:
        for step in steps:
            manager.save(step, _state(step))


def restore(context: Context, max_tries: int | None = None, then_save: int | None = None) -> int | None:
    """The restored step, which the restored values confirm."""
    found = _state(0)
    with CheckpointManager(context.root, preempt_on=()) as manager:
        step = manager.restore(found, max_tries=max_tries)
        assert found["step"] == step
        assert float(found["weights"].mean()) == step
        if then_save is not None:
            manager.save(then_save, _state(then_save))
    return step


def crash_after_restore(context: Context, told: str, max_tries: int | None = None) -> None:
    """Like a job whose first step after the restore fails: nothing is saved, and no rank ends in good order."""
    step = restore(context, max_tries=max_tries)
    with Path(f"{told}-{context.rank}").open("a") as file:
        file.write(f"{step} ")
    os.kill(os.getpid(), signal.SIGKILL)


def reject(context: Context, number: int, by_name: int) -> dict[str, Any]:
    """Rejects a step. Returns the unreached nodes and the new "latest". The step `by_name` must still load."""
    with CheckpointManager(context.root, preempt_on=()) as manager:
        not_reached = list(manager.reject(number))
        found = {"not_reached": not_reached, "latest": manager.latest_step(), "all": list(manager.all_steps())}
        assert manager.restore(_state(0), by_name) == by_name
    return found


def look(context: Context) -> int | None:
    with CheckpointManager(context.root, preempt_on=()) as manager:
        return manager.latest_step()
