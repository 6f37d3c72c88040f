"""A step of ranks that train: how long each save blocks training, and how long training steps take meanwhile."""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rank.cost import Sample, measured
from benchmarks.rank.rounds import Case, Taken, all_agree, built, loaded, shuffled, slug, take, total
from benchmarks.rank.stall_ways import Contender, NoSaves, contender_of
from benchmarks.rank.state import State
from benchmarks.rank.ways import agent_root
from tests.steps.context import Context

_WARM_BYTES = 1 << 20
_WIDTH = {"cpu": 384, "cuda": 4096}  # of a step's matrices: about 10 ms on one core, 20 ms on a GPU
_PRODUCTS = 8
_LAP_S = 0.001


class Laps:
    """A thread that repeatedly sleeps for a millisecond. A lap takes longer while another thread holds the interpreter."""

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
        """The average seconds of a lap."""
        self._is_over = True
        self._thread.join()
        return (time.perf_counter() - self._began) / max(1, self._laps)


Figures = tuple[list[float], list[float], list[float], float]


class _Ended:
    """The time at which a save ended. A save without a future has ended before."""

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
    """Steps that compute, change the state in place and synchronise with the other ranks, with saves in between."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._group: Any = dist.new_group()  # saves in the background use the default group
        width = _WIDTH[state.device.type]
        self._matrix = torch.randn(width, width, device=state.device)
        self._count = 0

    def run(self, contender: Contender, names: Sequence[str], every: int) -> Figures:
        """Seconds that each save blocks, seconds until its future is done, seconds of each step, and of a lap.

        A save begins `every` steps after the previous one, or when that is done. Each save has the state that
        `State.train` filled. The last save is over on return.
        """
        blocked: list[float] = []
        done: list[float] = []
        steps: list[float] = []
        laps = Laps()
        for name in names:
            self._state.train()
            _await(self._state.device)
            start = time.perf_counter()
            future = contender.begin(self._state, name)
            blocked.append(time.perf_counter() - start)
            ended = _Ended(future)
            steps += self._steps(contender, every, future)
            done.append(ended.wait() - start)
        lap = laps.end()
        contender.finish(names[-1])
        return blocked, done, steps, lap

    def _steps(self, contender: Contender, every: int, future: "Future[Any] | None") -> Iterator[float]:
        is_over, count = False, 0
        while count < every or not is_over:
            start = time.perf_counter()
            is_over = self._step(contender, is_done=future is None or future.done())
            count += 1
            yield time.perf_counter() - start

    def _step(self, contender: Contender, *, is_done: bool) -> bool:
        """Returns whether the save is done on all ranks."""
        product = self._matrix
        for _ in range(_PRODUCTS):
            product = torch.tanh(product @ self._matrix)
        contender.allow_change()
        part = self._state.parts[self._count % len(self._state.parts)]
        part.words[: 1 << 16].zero_()
        self._count += 1
        _await(self._state.device)
        votes = torch.tensor([float(is_done)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())


def train(
    context: Context,
    kind: str,
    size_bytes: int,
    cases: Sequence[Case],
    rounds: int,
    saves: int,
    every: int,
    *,
    deadline_s: float,
) -> dict[str, Any] | None:
    """In each round every case trains and loads its last save. Rank 0 returns the samples, the others None."""
    contenders = {case["name"]: contender_of(context, case["way"], case["options"]) for case in cases}
    small = built(context, kind, _WARM_BYTES)
    for name, contender in contenders.items():
        _one(context, small, Training(small), contender, f"warm-{slug(name)}", 1, 1)
    state = built(context, kind, size_bytes)
    training = Training(state)
    taken: dict[str, Taken] = {"copy": {}, "block": {}, "p50": {}, "p99": {}, "lap": {}}
    for name, contender in contenders.items():  # the first save allocates memory, which later ones reuse
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
    """One run of a case: its cost, with the seconds that a save blocks, and of the median and slowest steps."""
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
    """One copy of all bytes into memory in use, pinned for a GPU: the least cost of staging.

    The state was written right before the copy, as before each save.
    """
    state.fill()
    _await(state.device)
    sources = [part.words for part in state.parts]
    is_pinned = state.device.type == "cuda"
    targets = [torch.zeros(words.shape, dtype=words.dtype, pin_memory=is_pinned) for words in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=is_pinned)
        _await(state.device)

    return measured(copy, lambda: None, None)


def _await(device: torch.device) -> None:
    """Waits until the GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
