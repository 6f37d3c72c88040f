"""Steps: a peer's agent fails while it receives copies; and saves that return before their copies exist."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from replicated_ckpt import failpoints
from tests.agent.agents import wait_for
from tests.harness.processes import agent_of
from tests.steps.context import Context
from tests.steps.state import failure, report_of
from tests.stopwatch import Stopwatch

PIECE_ELEMENTS = 1 << 18  # one MiB of float32
AGENT_LOG_WAIT_S = 0.05
OVER_WITHIN_S = 40.0


def pieces(rank: int, count: int, seed: int) -> dict[str, torch.Tensor]:
    """This rank's own tensors of one MiB each, a function of rank and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return {f"rank{rank}/{index}": torch.rand(PIECE_ELEMENTS, generator=generator) for index in range(count)}


class SignallingPlanner(DefaultSavePlanner):
    """Sends a signal to an agent when half of rank 0's items are resolved."""

    def __init__(self, context: Context, victim: int, number: int, count: int) -> None:
        super().__init__()
        self._left = count // 2 if context.rank == 0 else -1
        self._root = context.roots[victim]
        self._number = number

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(agent_of(self._root), self._number)
        return super().resolve_data(write_item)


def save_while_an_agent_fails(
    context: Context, /, checkpoint_id: str, victim: int, how: str, count: int, **writer: Any
) -> dict[str, Any]:
    """Saves pieces. The agent of node `victim` gets SIGKILL or SIGSTOP in the middle. Returns this rank's outcome.

    If the save is acknowledged earlier, the signal follows its end.
    """
    planner = SignallingPlanner(context, victim, getattr(signal, how), count)
    stopwatch = Stopwatch()
    storage_writer = context.writer(**writer)
    try:
        dcp.save(
            pieces(context.rank, count, 1), checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner
        )
    except CheckpointException as exc:
        return {"seconds": stopwatch.stop(), **failure(exc)}
    storage_writer.wait(OVER_WITHIN_S)
    dist.barrier()  # a stopped agent stays so until it is over everywhere
    return {"seconds": stopwatch.stop(), "report": report_of(storage_writer.last_save)}


def let_go_on(context: Context, victim: int) -> None:
    """Continues a stopped agent."""
    if context.rank == 0:
        os.kill(agent_of(context.roots[victim]), signal.SIGCONT)


def save_pieces(context: Context, /, checkpoint_id: str, count: int, **writer: Any) -> None:
    dcp.save(pieces(context.rank, count, 1), checkpoint_id=checkpoint_id, storage_writer=context.writer(**writer))


def save_pieces_told_to_stop(context: Context, checkpoint_id: str, count: int) -> dict[str, Any]:
    """Saves pieces. Every node's agent is told to stop once its rank has registered the node, and rank 0 plans slowly."""

    def stop(_: str) -> None:
        os.kill(agent_of(context.root), signal.SIGTERM)
        log = context.root / ".agent" / "log"
        wait_for(lambda: "stopping on SIGTERM" in log.read_text(), 60.0, "the agent hears the signal")
        time.sleep(1.0 if context.rank == 0 else 0.0)  # an agent that does not wait for the save has left by then

    writer = context.writer()
    with failpoints.arm("rank.registered", stop):
        dcp.save(pieces(context.rank, count, 1), checkpoint_id=checkpoint_id, storage_writer=writer)
    return report_of(writer.last_save)


def load_pieces(context: Context, checkpoint_id: str, count: int, ranks: int) -> dict[str, Any]:
    """Loads the pieces of all ranks that saved into other values, and compares every bit."""
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = context.reader()
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
    return {
        "same": all(torch.equal(found[name], wanted[name]) for name in wanted),
        "report": report_of(reader.last_load),
    }


def copies_made(context: Context, checkpoint_id: str, names: list[str], copies: int, within_s: float) -> int:
    """Waits until each shard lies in `copies` stores. Returns the smallest number found."""
    deadline = time.monotonic() + within_s
    while True:
        least = min(sum((root / checkpoint_id / name).exists() for root in context.roots) for name in names)
        if least >= copies or time.monotonic() > deadline:
            return least
        time.sleep(AGENT_LOG_WAIT_S)
