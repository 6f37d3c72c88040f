"""`python -m tests.fault.torture`: simulates schedules, prints the seeds that fail, and replays one with --seed N."""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.fault.torture.processes import REAL
from tests.fault.torture.schedule import SIMULATION, STEPS, Backend, Schedule

REAL_STEPS = 5


def fast_directory() -> Path:
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="rckpt-torture-", dir=shm if shm.is_dir() else None))


def run_seed(seed: int, backend: Backend = SIMULATION, steps: int = STEPS) -> tuple[Schedule, str]:
    """Runs one schedule; returns it, and what went wrong, or ""."""
    base = fast_directory()
    schedule = Schedule(seed, base, backend)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.run(steps)
    except Exception:  # noqa: BLE001 - whatever it was, it is a failure of this seed
        return schedule, traceback.format_exc()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return schedule, ""


Outcome = tuple[list[str], str, Counter[str]]


def outcome_of(seed: int) -> Outcome:
    schedule, problem = run_seed(seed)
    return schedule.lines, problem, schedule.counts


def real_outcome(seed: int) -> Outcome:
    schedule, problem = run_seed(seed, REAL, REAL_STEPS)
    return schedule.lines, problem, schedule.counts


def outcomes(seeds: Sequence[int]) -> Iterator[Outcome]:
    """What became of each seed, in order; many are simulated on all cores."""
    if len(seeds) == 1:
        yield outcome_of(seeds[0])
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_quiet) as pool:
        yield from pool.map(outcome_of, seeds)


def _quiet() -> None:
    logging.basicConfig(level=logging.CRITICAL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.torture", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and tell it step by step")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--processes", action="store_true", help="with real agents and ranks instead of a simulation")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every schedule step by step, with the logs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    seeds = range(arguments.first, arguments.first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    counts: Counter[str] = Counter()
    failed, started = [], time.monotonic()
    found = (real_outcome(seed) for seed in seeds) if arguments.processes else outcomes(seeds)
    for seed, outcome in zip(seeds, found, strict=True):
        lines, problem, counted = outcome
        counts += counted
        if problem or arguments.verbose or arguments.seed is not None:
            print("\n".join(lines), problem, sep="\n", flush=True)
        if problem:
            failed.append(seed)
            option = " --processes" if arguments.processes else ""
            print(f"FAILED: seed {seed}; replay: python -m tests.fault.torture --seed {seed}{option}", flush=True)
    how = "with real processes" if arguments.processes else "simulated"
    print(
        f"{len(seeds)} schedules {how} in {time.monotonic() - started:.0f} s: "
        + ", ".join(f"{counts[name]} {name}" for name in ("steps", "saves", "acknowledged", "kills", "loads"))
        + f", {counts['beyond']} times a checkpoint was beyond its envelope; failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
