"""Steps: `dcp.async_save`, in a thread or in a process of its own."""

import gc
import os
import signal
import tempfile
import time
from concurrent.futures import Future
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.config import Ack
from replicated_ckpt.stores.files.locks import FileLock
from replicated_ckpt.stores.peer.local_messages import SOCKET_NAME
from tests.harness.cluster import Digests
from tests.harness.processes import agent_of, open_files
from tests.steps.context import Context
from tests.steps.failing import FailingPlanner
from tests.steps.state import build_all, digests_of, failure
from tests.steps.states import State
from tests.stopwatch import Stopwatch


class SlowPlanner(DefaultSavePlanner):
    """Takes two seconds for the data of a save."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if not self.__dict__.setdefault("_slept", False):
            self._slept = True
            time.sleep(2.0)
        return super().resolve_data(write_item)


def start(context: Context, states: dict[str, State], checkpoint_id: str, planner: DefaultSavePlanner) -> Future[Any]:
    future = dcp.async_save(dict(states), checkpoint_id=checkpoint_id, storage_writer=context.writer(), planner=planner)
    assert isinstance(future, Future)
    return future


def save(context: Context, kinds: list[str], checkpoint_ids: list[str]) -> list[Digests]:
    """Saves in the background, one save after the other. Overwrites the values as soon as that is allowed."""
    saved = []
    for seed, checkpoint_id in enumerate(checkpoint_ids):
        states = build_all(context, kinds, seed)
        saved.append(digests_of(states))
        future = start(context, states, checkpoint_id, DefaultSavePlanner())
        spoil({kind: state.state_dict() for kind, state in states.items()})
        future.result(timeout=60)
    return saved


def spoil(state: Any) -> None:
    """Zeroes every tensor in place, without a collective."""
    if isinstance(state, torch.Tensor):
        state.detach().zero_()
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            spoil(value)


def save_in_process(context: Context, kinds: list[str], checkpoint_ids: list[str]) -> list[Digests]:
    """Like `save`, but each rank's writer runs in a second process, which serves all saves."""
    tempfile.tempdir = "/tmp"  # Tensors go there through a socket, whose path may have 107 bytes at most.
    saved = []
    for seed, checkpoint_id in enumerate(checkpoint_ids):
        states = build_all(context, kinds, seed)
        saved.append(digests_of(states))
        future = dcp.async_save(
            dict(states),
            checkpoint_id=checkpoint_id,
            storage_writer=context.writer(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert isinstance(future, Future)
        future.result(timeout=100)
    return saved


def save_breaks_in_process(context: Context, kinds: list[str], checkpoint_id: str, ranks: list[int]) -> str:
    """Like `save_in_process`, but `ranks` raise in the second process. Returns this rank's error from the future."""
    tempfile.tempdir = "/tmp"
    future = dcp.async_save(
        dict(build_all(context, kinds, 0)),
        checkpoint_id=checkpoint_id,
        storage_writer=context.writer(),
        planner=FailingPlanner("write", fails_here=context.rank in ranks),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(future, Future)
    return str(future.exception(timeout=100))


def save_and_die(context: Context, kinds: list[str], ack: Ack) -> None:
    """Saves in the background, and is killed once the save is acknowledged."""
    states = build_all(context, kinds, 0)
    writer = context.writer(ack=ack)
    future = dcp.async_save(dict(states), checkpoint_id="step-1", storage_writer=writer)
    assert isinstance(future, Future)
    future.result(timeout=100)
    was_there = (context.root / "step-1").exists()
    context.root.with_name(f"seen{context.rank}").write_text(str(was_there))
    os.kill(os.getpid(), signal.SIGKILL)


def save_ahead(context: Context, kinds: list[str], checkpoint_ids: list[str]) -> dict[str, Any]:
    """Saves as soon as agents have accepted the previous save. Returns the contents of the store at each
    acknowledgement.
    """
    saved, seen, reported = [], [], list[str]()
    writer = ReplicatedWriter(context.root, on_save=lambda report: reported.append(report.checkpoint_id))
    for seed, checkpoint_id in enumerate(checkpoint_ids):
        states = build_all(context, kinds, seed)
        saved.append(digests_of(states))
        future = dcp.async_save(dict(states), checkpoint_id=checkpoint_id, storage_writer=writer)
        assert isinstance(future, Future)
        spoil({kind: state.state_dict() for kind, state in states.items()})
        future.result(timeout=100)
        seen.append((context.root / checkpoint_id).exists())
    writer.wait(100, ack="peer")
    there = [(context.root / checkpoint_id).exists() for checkpoint_id in checkpoint_ids]
    assert writer.last_save is not None
    copies = writer.last_save.copies_made
    return {"digests": saved, "seen": seen, "there": there, "reported": reported, "copies": copies}


def save_breaks(context: Context, kinds: list[str], checkpoint_id: str, phase: str, ranks: list[int]) -> dict[str, Any]:
    """A save in the background in which `ranks` raise. Returns this rank's error from the future."""
    states = build_all(context, kinds, 0)
    planner = FailingPlanner(phase, fails_here=context.rank in ranks)
    future = start(context, states, checkpoint_id, planner)
    error = future.exception(timeout=60)
    assert isinstance(error, CheckpointException), error
    return failure(error)


class Interrupting:
    """An object whose copying is interrupted."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KeyboardInterrupt


def save_interrupted(context: Context, rank: int) -> dict[str, Any]:
    """A save in the background in which one rank is interrupted while it copies its state. Returns each rank's error,
    and after how long.
    """
    state = {f"r{context.rank}": Interrupting() if context.rank == rank else torch.ones(1000)}
    stopwatch = Stopwatch()
    try:
        future = dcp.async_save(state, checkpoint_id="step-1", storage_writer=context.writer())
        assert isinstance(future, Future)
        found = future.exception(timeout=60)
    except KeyboardInterrupt as exc:
        found = exc
    return {"seconds": stopwatch.stop(), "type": type(found).__name__, "text": str(found)}


def leave_in_flight(context: Context, kinds: list[str], checkpoint_id: str) -> dict[str, Any]:
    """Starts a slow save in the background. The interpreter ends right after this step."""
    states = build_all(context, kinds, 0)
    before = digests_of(states)
    context.leaves_work_behind = True
    future = start(context, states, checkpoint_id, SlowPlanner())
    return {"digests": before, "in_flight": not future.done()}


def descriptors_of_saves(context: Context, saves: int) -> list[int]:
    """The number of open descriptors of this process after each save, with a new writer for each."""
    counts = []
    for number in range(saves):
        future = dcp.async_save(
            {f"rank{context.rank}": torch.ones(1 << 18)},
            checkpoint_id=f"step-{number}",
            storage_writer=ReplicatedWriter(context.root),
        )
        assert isinstance(future, Future)
        future.result(timeout=60)
        del future
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def connections_of_kept_writers(context: Context, saves: int) -> list[int]:
    """The number of ranks' connections to this node's agent after each save. A new writer is kept for each save."""
    counts: list[int] = []
    writers = [ReplicatedWriter(context.root) for _ in range(saves)]
    for number, writer in enumerate(writers):
        state = {f"rank{context.rank}": torch.ones(1 << 18)}
        future = dcp.async_save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
        assert isinstance(future, Future)
        future.result(timeout=60)
        counts.append(_settled_connections(agent_of(context.root), counts))
    return counts


def bytes_of_saves(context: Context, mebibytes: int) -> dict[str, int]:
    """Bytes that this process writes to files between the end of staging and the end of a save: if the agent writes,
    and if the process does.
    """
    state = {f"rank{context.rank}": torch.ones(mebibytes << 18)}
    writer = context.writer(overwrite=True)
    unix_socket, away = (context.root / ".agent" / name for name in (SOCKET_NAME, "away"))
    written = {}
    for by in ("agent", "rank"):
        if by == "rank":
            unix_socket.rename(away)
        dist.barrier()
        future = dcp.async_save(dict(state), checkpoint_id="step-1", storage_writer=writer)
        assert isinstance(future, Future)
        before = _count_written()
        future.result(timeout=200)
        written[by] = _count_written() - before
    away.rename(unix_socket)
    return written


def _count_written() -> int:
    """`wchar` of proc(5): the bytes that this process has passed to write(2) and similar calls."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["wchar"])


def footprint_of_saves(context: Context, saves: int, mebibytes: int) -> list[dict[str, int]]:
    """Resident bytes, descriptors and threads of this process and its node's agent after each of many saves."""
    state, writer = {f"rank{context.rank}": torch.ones(mebibytes << 18)}, context.writer(overwrite=True)
    found = []
    for number in range(saves):
        state[f"rank{context.rank}"].fill_(number)
        future = dcp.async_save(dict(state), checkpoint_id="step-1", storage_writer=writer)
        assert isinstance(future, Future)
        future.result(timeout=100)
        del future
        writer.wait(100)
        gc.collect()
        agent = agent_of(context.root)
        own = {f"rank {name}": value for name, value in _footprint(os.getpid()).items()}
        found.append(own | {f"agent {name}": value for name, value in _footprint(agent).items()})
    return found


def saves_with_forks(context: Context, kinds: list[str], saves: int) -> dict[str, Any]:
    """Forks processes in the middle of each save, like a data loader's workers. They live on.

    Returns the agent's open connections to ranks after each save, and whether the agent's start lock is free at the
    end.
    """
    states, workers, found = build_all(context, kinds, 0), list[BaseProcess](), list[int]()
    for number in range(saves):
        future = start(context, states, f"step-{number}", DefaultSavePlanner())
        while not future.done():
            workers.append(get_context("fork").Process(target=time.sleep, args=(100,), daemon=True))
            workers[-1].start()
            time.sleep(0.05)
        future.result()
        found.append(_settled_connections(agent_of(context.root), found))
    is_start_free = FileLock.acquire(context.root / ".agent" / "start") is not None
    for worker in workers:
        worker.kill()
        worker.join()
    return {"open": found, "workers": len(workers), "is_start_free": is_start_free, "digests": digests_of(states)}


def _settled_connections(pid: int, before: list[int]) -> int:
    """The number of local sockets after a save. Gives them up to 20 s to fall to that of the first save."""
    return _local_connections(pid, before[0], within_s=20.0) if before else _local_connections(pid)


def _local_connections(pid: int, at_most: int = 0, within_s: float = 1.0) -> int:
    """The smallest number of local sockets of a process within a time; ends early at `at_most`.

    On a busy machine an agent closes its end of a connection some time after the rank.
    """
    found, deadline = [], time.monotonic() + within_s
    while True:
        links = open_files(pid)
        inodes = [line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        found.append(sum(f"socket:[{inode}]" in links for inode in inodes))
        if found[-1] <= at_most or time.monotonic() > deadline:
            return min(found)
        time.sleep(0.1)


def _footprint(pid: int) -> dict[str, int]:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "bytes": int(status["VmRSS"].split()[0]) << 10,
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }
