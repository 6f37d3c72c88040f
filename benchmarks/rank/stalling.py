"""The step of ranks that train: how long training stands still for each save, and how long its steps take meanwhile."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.rank.cost import Sample, measured
from benchmarks.rank.rounds import Case, Taken, all_agree, built, loaded, shuffled, slug, take, total
from benchmarks.rank.state import State
from benchmarks.rank.ways import Ours, Stock, agent_root, shared_directory
from replicated_ckpt import CachedSavePlanner, Retention
from tests.steps.context import Context

_WARM_BYTES = 1 << 20
_WIDTH = 384  # of the matrices that a step multiplies: some 10 ms on one core
_PRODUCTS = 8
_LAP_S = 0.001


class Laps:
    """A thread that sleeps for a millisecond again and again: a lap takes longer while something holds the interpreter."""

    def __init__(self) -> None:
        self._laps, self._is_over = 0, False
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            time.sleep(_LAP_S)
            self._laps += 1

    def end(self) -> float:
        """Seconds of a lap, on average."""
        self._is_over = True
        self._thread.join()
        return (time.perf_counter() - self._began) / max(1, self._laps)


class NoSaves:
    """Training alone."""

    def finish(self, name: str) -> None:
        """Nothing is under way."""
        del name

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        del state, name
        return None


class StockSync(Stock):
    """FileSystemWriter; training waits for all of it."""

    def finish(self, name: str) -> None:
        """A save is over with its future."""

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        self.save(state, name)
        return None


class StockAsync(StockSync):
    """FileSystemWriter in `dcp.async_save`'s thread: it is its own stager, which makes new memory for each copy."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._folder = shared_directory(context)

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        return future_of(dcp.async_save(state.values, storage_writer=dcp.FileSystemWriter(self._folder / name)))


class StockStaged(StockAsync):
    """In a thread with torch's DefaultStager, which keeps its copies from save to save, in shared memory if asked to."""

    def __init__(self, context: Context, *, in_shared_memory: bool) -> None:
        super().__init__(context)
        self._stager = DefaultStager(StagingOptions(False, in_shared_memory, False, False))

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        writer = dcp.FileSystemWriter(self._folder / name)
        return future_of(dcp.async_save(state.values, storage_writer=writer, async_stager=self._stager))


class OursSync(Ours):
    """ReplicatedWriter; training waits for all of it."""

    def finish(self, name: str) -> None:
        """Agents may have work left: with `ack="staged"` all of it, with "local" the copies."""
        self._writer.wait(ack="local")
        self.settle(name)

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        self.save(state, name)
        return None


class OursAsync(OursSync):
    """ReplicatedWriter in `dcp.async_save`'s thread, with no other argument."""

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        return future_of(
            dcp.async_save(state.values, checkpoint_id=name, storage_writer=self._writer, planner=self._planner)
        )


class OursAsManaged(OursAsync):
    """As CheckpointManager saves with `keep_last=1`: plans are kept, and files recycled."""

    def __init__(self, context: Context, options: Mapping[str, Any]) -> None:
        super().__init__(context, {**options, "retention": Retention(keep_last=1)}, CachedSavePlanner())

    def remove(self, name: str) -> None:
        """A later save retires it."""


Contender = NoSaves | StockSync | OursSync
Figures = tuple[list[float], list[float], list[float], float]


def future_of(answer: Any) -> "Future[Any]":
    assert isinstance(answer, Future)
    return answer


_STOCK: Mapping[str, Callable[[Context], Contender]] = {
    "none": lambda _: NoSaves(),
    "stock sync": StockSync,
    "stock async": StockAsync,
    "stock staged": lambda context: StockStaged(context, in_shared_memory=False),
    "stock shared": lambda context: StockStaged(context, in_shared_memory=True),
}
_OURS = {"ours sync": OursSync, "ours async": OursAsync, "ours as managed": OursAsManaged}


def contender_of(context: Context, kind: str, options: Mapping[str, Any]) -> Contender:
    return _OURS[kind](context, options) if kind in _OURS else _STOCK[kind](context)


class _Ended:
    """When a save ended, taken as it ended; one without a future ended before this was made."""

    def __init__(self, future: "Future[Any] | None") -> None:
        self._future, self._at = future, time.perf_counter()
        if future is not None:
            future.add_done_callback(self._note)

    def _note(self, _: "Future[Any]") -> None:
        self._at = time.perf_counter()

    def wait(self) -> float:
        if self._future is not None:
            self._future.result()
        return self._at


class Training:
    """Steps that compute, change the state in place and meet the other ranks, and saves between them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._group: Any = dist.new_group()  # saves in the background have the default one
        self._matrix = torch.randn(_WIDTH, _WIDTH)
        self._count = 0

    def run(self, contender: Contender, names: Sequence[str], every: int) -> Figures:
        """Seconds that each save blocks, until its future is done, of each step, and of a lap; the last save is over then.

        A save begins `every` steps after the last one, or when that is done. Each holds the state as it was filled.
        """
        blocked: list[float] = []
        done: list[float] = []
        steps: list[float] = []
        laps = Laps()
        for name in names:
            self._state.fill()
            start = time.perf_counter()
            future = contender.begin(self._state, name)
            blocked.append(time.perf_counter() - start)
            ended = _Ended(future)
            steps += self._steps(every, future)
            done.append(ended.wait() - start)
        lap = laps.end()
        contender.finish(names[-1])
        return blocked, done, steps, lap

    def _steps(self, every: int, future: "Future[Any] | None") -> Iterator[float]:
        is_over, count = False, 0
        while count < every or not is_over:
            start = time.perf_counter()
            is_over = self._step(is_done=future is None or future.done())
            count += 1
            yield time.perf_counter() - start

    def _step(self, *, is_done: bool) -> bool:
        """Whether the save is done on all ranks."""
        product = self._matrix
        for _ in range(_PRODUCTS):
            product = torch.tanh(product @ self._matrix)
        part = self._state.parts[self._count % len(self._state.parts)]
        part.words[: 1 << 16].zero_()
        self._count += 1
        votes = torch.tensor([float(is_done)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())


def train(
    context: Context, size_bytes: int, cases: Sequence[Case], rounds: int, saves: int, every: int, *, deadline_s: float
) -> dict[str, Any] | None:
    """Each round trains with every case, and loads what its last save wrote. Rank 0 returns the samples, others None."""
    contenders = {case["name"]: contender_of(context, case["way"], case["options"]) for case in cases}
    small = built(context, "fsdp2", _WARM_BYTES)
    for name, contender in contenders.items():
        _one(context, small, Training(small), contender, f"warm-{slug(name)}", 1, 1)
    state = built(context, "fsdp2", size_bytes)
    training = Training(state)
    taken: dict[str, Taken] = {"copy": {}, "block": {}, "p50": {}, "p99": {}, "lap": {}}
    for name, contender in contenders.items():  # the first one makes memory, which all later ones use again
        _one(context, state, training, contender, f"first-{slug(name)}", 1, 1)
    start = time.monotonic()
    for number in range(rounds):
        if number and not all_agree(time.monotonic() - start < deadline_s):
            break
        take(taken["copy"], "copy", _copied(state))
        for name in shuffled(list(contenders), number):
            for work, sample in _one(
                context, state, training, contenders[name], f"{number}-{slug(name)}", saves, every
            ).items():
                take(taken[work], name, sample)
    state_bytes = total(state)
    return {**taken, "state_bytes": state_bytes} if context.rank == 0 else None


def _one(
    context: Context, state: State, training: Training, contender: Contender, name: str, saves: int, every: int
) -> dict[str, Sample | None]:
    """One run of a case: its costs with the seconds that a save blocks, and with the median and slowest steps."""
    names = [f"{name}-{number}" for number in range(saves)]
    figures: list[Figures] = []
    cost = measured(lambda: figures.append(training.run(contender, names, every)), lambda: None, agent_root(context))
    if not isinstance(contender, NoSaves):
        loaded(context, state, contender, names[-1], False)
        for saved in names:
            dist.barrier()
            contender.remove(saved)
    blocked, done, steps, lap = figures[0]
    if cost is None:
        return dict.fromkeys(("block", "p50", "p99", "lap"))
    slowest = statistics.quantiles(steps, n=100, method="inclusive")[98] if len(steps) > 1 else steps[0]
    return {
        "block": replace(cost, seconds=statistics.median(blocked), settled_s=statistics.median(done)),
        "p50": replace(cost, seconds=statistics.median(steps)),
        "p99": replace(cost, seconds=slowest),
        "lap": replace(cost, seconds=lap),
    }


def _copied(state: State) -> Sample | None:
    """One copy of every byte into memory that was used before: what staging costs at least."""
    targets = [torch.zeros_like(part.words) for part in state.parts]
    sources = [part.words for part in state.parts]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return measured(copy, lambda: None, None)
