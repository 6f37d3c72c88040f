"""Steps: a node is lost and returns while the ranks live on."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.harness.processes import agent_of, end
from tests.steps.context import Context


def kill_agent_of(root: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        end([agent_of(root)])


def lose(context: Context, nodes: Sequence[int]) -> None:
    """Kills the agents of these nodes, and moves the contents of their stores away."""
    if context.node in nodes:
        kill_agent_of(context.root)
        context.root.rename(context.root.with_suffix(".aside"))
        context.root.mkdir()
    dist.barrier()


def bring_back(context: Context, nodes: Sequence[int]) -> None:
    """Restores the stores of these nodes to their contents before the loss."""
    if context.node in nodes:
        kill_agent_of(context.root)
        shutil.rmtree(context.root)
        context.root.with_suffix(".aside").rename(context.root)
    dist.barrier()


def staging_left(context: Context, within_s: float = 15.0) -> list[str]:
    """The contents of this node's `.staging`. Waits up to `within_s` until there are none."""
    folder = context.root / ".staging"
    deadline = time.monotonic() + within_s
    while (left := sorted(path.name for path in folder.rglob("*"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
