"""Steps: a link fails in the middle of a save or load, and recovers."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from replicated_ckpt import failpoints
from tests.harness.network import Network
from tests.steps.context import Context
from tests.steps.peers import pieces
from tests.steps.state import failure, report_of
from tests.stopwatch import Stopwatch


def change(context: Context, network: str, how: str, nodes: list[int]) -> None:
    """Calls one of the methods of `Network` while every rank waits."""
    if context.rank == 0:
        getattr(Network(network), how)(*nodes)
    dist.barrier()


def save_while_cut_off(
    context: Context,
    /,
    checkpoint_id: str,
    count: int,
    network: str,
    how: str,
    nodes: list[int],
    point: str,
    **writer: Any,
) -> dict[str, Any]:
    """Saves pieces. Rank 0 changes the network at the failpoint "name@times". Returns this rank's outcome."""
    name, _, times = point.partition("@")
    action = nth(int(times or 1) if context.rank == 0 else 0, lambda: getattr(Network(network), how)(*nodes))
    storage_writer = context.writer(**writer)
    stopwatch = Stopwatch()
    try:
        with failpoints.arm(name, lambda _: action()):
            dcp.save(pieces(context.rank, count, 1), checkpoint_id=checkpoint_id, storage_writer=storage_writer)
    except CheckpointException as exc:
        return {"seconds": stopwatch.stop(), **failure(exc)}
    return {"seconds": stopwatch.stop(), "report": report_of(storage_writer.last_save)}


def nth(times: int, action: Callable[[], None]) -> Callable[[], None]:
    """A function that calls the action at its n-th call, or never for 0."""
    left = times

    def counted() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            action()

    return counted


class ActingPlanner(DefaultLoadPlanner):
    """Calls the action when this rank has received the item of that number, or never for 0."""

    def __init__(self, item: int, action: Callable[[], None]) -> None:
        super().__init__()
        self._counted = nth(item, action)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._counted()
        super().commit_tensor(read_item, tensor)


def load_while_cut_off(
    context: Context, checkpoint_id: str, count: int, ranks: int, network: str, node: int, by_rank: int
) -> dict[str, Any]:
    """Loads the pieces of all ranks that saved, and compares every bit. `by_rank` cuts a node's store off in the
    middle.

    `given_up`: the log line and time of each source that is no longer used.
    """
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    planner = ActingPlanner(int(context.rank == by_rank), lambda: Network(network).cut_store(node))
    reader, said = context.reader(), Said()
    logging.getLogger("replicated_ckpt").addHandler(said)
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    given_up = [line for line in said.lines if "is not used" in line[0]]
    return {"same": same, "report": report_of(reader.last_load), "given_up": given_up}


class Said(logging.Handler):
    """Log lines with their times in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), record.created))
