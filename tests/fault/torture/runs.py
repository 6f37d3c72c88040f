"""Runs schedules: one after the other, or many on all cores.

Not in `__main__`, whose functions spawned processes do not find.
"""

import gc
import logging
import os
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.fault.torture.course import SIMULATION, Backend, Course
from tests.fault.torture.real.processes import REAL
from tests.fault.torture.schedule import STEP_COUNT, Schedule

REAL_STEPS = 5


def fast_directory() -> Path:
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="rckpt-torture-", dir=shm if shm.is_dir() else None))


Script = Callable[[Course], None]


def run_seed(
    seed: int, backend: Backend = SIMULATION, steps: int = STEP_COUNT, script: Script | None = None
) -> tuple[Schedule, str]:
    """Runs one schedule, of random steps or of those of a script; returns it, and what went wrong, or ""."""
    base = fast_directory()
    schedule = Schedule(seed, base, backend)
    try:
        with warnings.catch_warnings(), _without_collections():
            warnings.simplefilter("ignore")
            schedule.run(steps) if script is None else schedule.follow(script)
    except Exception:  # noqa: BLE001 - whatever it was, it is a failure of this seed
        return schedule, traceback.format_exc()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return schedule, ""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Cycles are collected after the block, and what was there before, as all of torch, is not looked through for them."""
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


Outcome = tuple[list[str], str, Counter[str]]


def outcome_of(seed: int, script: Script | None = None) -> Outcome:
    schedule, problem = run_seed(seed, script=script)
    return schedule.course.lines, problem, schedule.course.counts


def real_outcome(seed: int, steps: int = REAL_STEPS, script: Script | None = None) -> Outcome:
    schedule, problem = run_seed(seed, REAL, steps, script)
    return schedule.course.lines, problem, schedule.course.counts


def outcomes(seeds: Sequence[int], script: Script | None = None) -> Iterator[Outcome]:
    """What became of each seed, in order; many are simulated on all cores that this process may use."""
    if len(seeds) == 1:
        yield outcome_of(seeds[0], script)
        return
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        yield from pool.map(partial(outcome_of, script=script), seeds)


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.CRITICAL)
