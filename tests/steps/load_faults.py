"""Steps: a process ends in the middle of a load. They return each remaining rank's error, after how long, and what it
can load then.
"""

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.harness.processes import agent_of
from tests.steps.context import Context
from tests.steps.network import ActingPlanner
from tests.steps.peers import load_pieces, pieces
from tests.steps.state import failure
from tests.stopwatch import Stopwatch

_OTHERS_S = 30.0
_AT_ITEM = 3


def load_while_killed(
    context: Context, checkpoint_id: str, count: int, ranks: int, victim: str, by_rank: int, left: int
) -> dict[str, Any]:
    """Loads the pieces of all ranks that saved. `by_rank` kills itself ("rank"), or the agent of a node ("agent N").

    Each of the `left` ranks waits until all of them have a result: no rank may be informed by the end of another one.
    """
    kind, _, node = victim.partition(" ")
    pid = agent_of(context.roots[int(node)]) if kind == "agent" else os.getpid()
    planner = ActingPlanner(_AT_ITEM * int(context.rank == by_rank), partial(os.kill, pid, signal.SIGKILL))
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in wanted.items()}
    reader, stopwatch = context.reader(), Stopwatch()
    outcome: dict[str, Any] = {}
    try:
        dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
    except CheckpointException as exc:
        outcome = failure(exc)
    outcome["seconds"] = stopwatch.stop()
    outcome["is_right"] = all(is_as_documented(found[name], wanted[name]) for name in wanted)
    await_others(context.roots[0].parent, context.rank, left)
    return outcome


def is_as_documented(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a failed load left what the docs promise: the checkpoint's bytes up to some place, then zeros for at most
    a window, then the old bytes.
    """
    return bool(((found == wanted) | (found == 0) | (found == -1)).all())


def await_others(folder: Path, rank: int, count: int) -> None:
    (folder / f"heard-{rank}").touch()
    deadline = time.monotonic() + _OTHERS_S
    while len(list(folder.glob("heard-*"))) < count:
        assert time.monotonic() < deadline, "some rank has heard nothing"
        time.sleep(0.05)


def load_twice(context: Context, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Like `load_while_killed`, followed by the same load without a fault."""
    names = ("checkpoint_id", "count", "ranks")
    return [load_while_killed(context, **arguments), load_pieces(context, **{name: arguments[name] for name in names})]
