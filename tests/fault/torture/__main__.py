"""`python -m tests.fault.torture`: simulates schedules, prints the seeds that fail, and replays one with --seed N."""

import argparse
import logging
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from tests.fault.torture.schedule import Schedule


def fast_directory() -> Path:
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="rckpt-torture-", dir=shm if shm.is_dir() else None))


def run_seed(seed: int) -> tuple[Schedule, str]:
    """Runs one schedule; returns it, and what went wrong, or ""."""
    base = fast_directory()
    schedule = Schedule(seed, base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.run()
    except Exception:  # noqa: BLE001 - whatever it was, it is a failure of this seed
        return schedule, traceback.format_exc()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return schedule, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.torture", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and tell it step by step")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every schedule step by step, with the logs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    seeds = range(arguments.first, arguments.first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    counts: Counter[str] = Counter()
    failed, started = [], time.monotonic()
    for seed in seeds:
        schedule, problem = run_seed(seed)
        counts += schedule.counts
        if problem or arguments.verbose or arguments.seed is not None:
            print("\n".join(schedule.lines), problem, sep="\n", flush=True)
        if problem:
            failed.append(seed)
            print(f"FAILED: seed {seed}; replay: python -m tests.fault.torture --seed {seed}", flush=True)
    print(
        f"{len(seeds)} schedules simulated in {time.monotonic() - started:.0f} s: "
        + ", ".join(f"{counts[name]} {name}" for name in ("steps", "saves", "acknowledged", "kills", "loads"))
        + f", {counts['beyond']} times a checkpoint was beyond its envelope; failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
