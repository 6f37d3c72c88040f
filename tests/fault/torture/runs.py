"""Runs schedules, one after the other or many on all cores.

A separate module, because spawned processes cannot import functions of `__main__`.
"""

import ctypes
import gc
import logging
import os
import re
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from difflib import ndiff
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.fault.torture.course import SIMULATION, Backend, Course
from tests.fault.torture.oracle import Violation
from tests.fault.torture.real.processes import REAL
from tests.fault.torture.schedule import STEP_COUNT, Schedule
from tests.fault.torture.simulated.clocks import OddClocks
from tests.fault.torture.simulated.cluster import Cluster
from tests.fault.torture.simulated.jobs import Job

REAL_STEPS = 5
REAL_WITHIN_S = 600
"""A real schedule takes 35 to 80 s on two busy cores, and 170 s if each load waits for stopped agents."""
_BASE = "rckpt-torture-"
_PR_SET_PDEATHSIG = 1


def _odd_cluster(base: Path, count: int, seed: int) -> Cluster:
    return Cluster(base, count, seed, OddClocks(seed))


ODD_CLOCKS = Backend(_odd_cluster, Job, has_true_clocks=False)


def fast_directory() -> Path:
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix=_BASE, dir=shm if shm.is_dir() else None))


Script = Callable[[Course], None]


def run_seed(
    seed: int,
    backend: Backend = SIMULATION,
    steps: int = STEP_COUNT,
    script: Script | None = None,
    *,
    within_s: int | None = None,
) -> tuple[Schedule, str]:
    """Runs one schedule, of random steps or of a script. Returns it, and the failure or "".

    `within_s`: a schedule that takes longer has failed. Only in a main thread that does not use SIGALRM.
    """
    base = fast_directory()
    schedule = Schedule(seed, base, backend)
    try:
        with warnings.catch_warnings(), _without_collections(), _bounded(within_s):
            warnings.simplefilter("ignore")
            schedule.run(steps) if script is None else schedule.follow(script)
    except Exception:  # noqa: BLE001 - whatever it was, it is a failure of this seed
        return schedule, traceback.format_exc()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return schedule, ""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Garbage collection runs only after the block, and ignores the objects that existed before it, such as all of
    torch.
    """
    gc.freeze()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        gc.collect()
        gc.unfreeze()


@contextmanager
def _bounded(within_s: int | None) -> Iterator[None]:
    """Raises Violation in the block once it has taken this many seconds."""
    if within_s is None:
        yield
        return

    def end(*_: object) -> None:
        raise Violation(f"the schedule has not ended within {within_s} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(within_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


Outcome = tuple[list[str], str, Counter[str]]


def outcome_of(seed: int, script: Script | None = None) -> Outcome:
    schedule, problem = run_seed(seed, script=script)
    return schedule.course.lines, problem, schedule.course.counts


def odd_clocks_outcome(seed: int, script: Script | None = None) -> Outcome:
    """Like `outcome_of`, with clocks that are wrong and that jump. If sequence numbers order all saves, clocks must not
    matter.

    The log must then equal that of the same schedule with true clocks.
    """
    schedule, problem = run_seed(seed, ODD_CLOCKS, script=script)
    course = schedule.course
    lines, jumps = course.lines, course.cluster.clocks.jumps
    if not problem and course.oracle.has_one_order():
        true = run_seed(seed, script=script)[0].course.lines
        changed = [line for line in ndiff(_without_base(true), _without_base(lines)) if line[0] in "-+"]
        problem = "\n".join(["with clocks that are wrong another thing happens:", *changed]) if changed else ""
    return [*lines, f"clocks jumped {jumps} times"], problem, course.counts


def _without_base(lines: Sequence[str]) -> list[str]:
    """The lines without the directory, which differs from run to run."""
    return [re.sub(rf"{_BASE}\w+", "BASE", line) for line in lines]


def real_outcome(seed: int, steps: int = REAL_STEPS, script: Script | None = None) -> Outcome:
    schedule, problem = run_seed(seed, REAL, steps, script)
    return schedule.course.lines, problem, schedule.course.counts


def bounded_real_outcome(seed: int, script: Script | None = None) -> Outcome:
    """Like `real_outcome`, but a schedule that hangs has failed."""
    schedule, problem = run_seed(seed, REAL, REAL_STEPS, script, within_s=REAL_WITHIN_S)
    return schedule.course.lines, problem, schedule.course.counts


def outcomes(
    seeds: Sequence[int], run: Callable[..., Outcome], script: Script | None = None, *, workers: int
) -> Iterator[Outcome]:
    """The outcome of each seed, in order. `workers` schedules run at once."""
    if len(seeds) == 1:
        yield run(seeds[0], script=script)
        return
    context, starter = get_context("spawn"), (os.getpid(),)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=starter) as pool:
        yield from pool.map(partial(run, script=script), seeds)


def _begin(starter: int) -> None:
    """Runs first in each process of the pool. The process then ends with its parent, however the parent ends
    (prctl(2)).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        os._exit(1)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.CRITICAL)
