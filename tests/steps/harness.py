"""Steps that fail, for tests of the harness."""

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from replicated_ckpt.dcp.c10d.world import World
from tests.steps.context import Context


def hang(context: Context) -> None:
    dist.barrier()  # a rank that ends while another one still connects to it fails that one
    if context.rank == 1:
        a_place_to_hang()


def sleep(context: Context) -> None:
    time.sleep(600)


def a_place_to_hang() -> None:
    time.sleep(600)


def raise_on(context: Context, rank: int) -> None:
    dist.barrier()
    if context.rank == rank:
        raise RuntimeError(f"rank {rank} raises on purpose")


def where(context: Context) -> dict[str, int]:
    dist.barrier()
    return {"rank": context.rank, "node": context.node, "pid": os.getpid()}


def process(context: Context) -> dict[str, Any]:
    """The properties of this process that are its own, and those that it shares."""
    descriptors = {str(path.resolve(strict=False)) for path in Path("/proc/self/fd").iterdir()}
    return {
        "session": World(context.rank, context.world_size, None).session,
        "environment": dict(os.environ),
        "shown": Path("/proc/self/environ").read_text().split("\0"),
        "cwd": str(Path.cwd()),
        "has_group": dist.is_initialized(),
        "sockets": [name for name in descriptors if "socket:" in name],
    }
