"""`python -m tests.fault.torture` runs simulated schedules and prints the seeds that fail. With --seed N it replays
one.
"""

import argparse
import logging
import os
import sys
import time
from collections import Counter

from tests.fault.torture.mutants import MUTANTS
from tests.fault.torture.runs import bounded_real_outcome, odd_clocks_outcome, outcome_of, outcomes
from tests.fault.torture.scripts import lose_trainers_often, meet_errors_often
from tests.fault.torture.simulated.by_hand import touch_files_often
from tests.fault.torture.simulated.operators import remove_and_drain_often

NAMES = ("steps", "saves", "acknowledged", "kills", "orphans", "orphans completed", "loads")
_SAY_EVERY, _SAY_EVERY_REAL = 100, 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.torture", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and tell it step by step")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="how many schedules at once (default: one for each core)")
    parser.add_argument("--processes", action="store_true", help="with real agents and ranks instead of a simulation")
    parser.add_argument(
        "--trainers",
        action="store_true",
        help="each save is handed over, and all trainers are killed in it, and nothing else",
    )
    parser.add_argument(
        "--errors", action="store_true", help="the system refuses a process something, and not much else"
    )
    parser.add_argument(
        "--people",
        action="store_true",
        help="people remove checkpoints and take nodes down, between faults of all kinds",
    )
    parser.add_argument(
        "--files",
        action="store_true",
        help="people copy, move, remove and restore files of stores, between faults of all kinds",
    )
    parser.add_argument(
        "--clocks",
        action="store_true",
        help="nodes' clocks are wrong and jump, in whatever else happens; one run alone must not notice",
    )
    parser.add_argument("--mutants", action="store_true", help="show that each known defect is found, at its seed")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every schedule step by step, with the logs")
    arguments = parser.parse_args()
    if arguments.processes and (arguments.errors or arguments.people or arguments.files or arguments.clocks):
        parser.error("--errors, --people, --files and --clocks are for simulated processes")
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    if arguments.mutants:
        return find_mutants()
    seeds = range(arguments.first, arguments.first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    counts: Counter[str] = Counter()
    failed, started = [], time.monotonic()
    scripts = {"trainers": lose_trainers_often, "errors": meet_errors_often, "people": remove_and_drain_often}
    scripts["files"] = touch_files_often
    script = next((scripts[name] for name in scripts if getattr(arguments, name)), None)
    simulated = odd_clocks_outcome if arguments.clocks else outcome_of
    run = bounded_real_outcome if arguments.processes else simulated
    found = outcomes(seeds, run, script, workers=arguments.workers or len(os.sched_getaffinity(0)))
    for done, (seed, outcome) in enumerate(zip(seeds, found, strict=True), start=1):
        lines, problem, counted = outcome
        if done % (_SAY_EVERY_REAL if arguments.processes else _SAY_EVERY) == 0:
            print(f"{done} schedules, the last one seed {seed}, after {time.monotonic() - started:.0f} s", flush=True)
        counts += counted
        if problem or arguments.verbose or arguments.seed is not None:
            print("\n".join(lines), problem, sep="\n", flush=True)
        if problem:
            failed.append(seed)
            chosen = [name for name in ("processes", "clocks", *scripts) if getattr(arguments, name)]
            option = "".join(f" --{name}" for name in chosen)
            print(f"FAILED: seed {seed}; replay: python -m tests.fault.torture --seed {seed}{option}", flush=True)
    how = "with real processes" if arguments.processes else "simulated"
    print(
        f"{len(seeds)} schedules {how} in {time.monotonic() - started:.0f} s: "
        + ", ".join(f"{counts[name]} {name}" for name in NAMES)
        + f", {counts['beyond']} times a checkpoint was beyond its envelope; failed: {failed or 'none'}"
    )
    return 1 if failed else 0


def find_mutants() -> int:
    """Runs each mutant at the seed that detects it, and the same seed without the mutant. Returns 1 unless only the
    mutant fails.
    """
    missed = 0
    for mutant in MUTANTS:
        with mutant.install():
            problem = mutant.problem_at(mutant.seed)
        is_found = bool(problem) and not mutant.problem_at(mutant.seed)
        missed += not is_found
        how = "seed" if mutant.script is None else f"script {mutant.script.__name__}, seed"
        found = problem.strip().rpartition("\n")[2][:200] if is_found else "NOT FOUND"
        print(f"{mutant.was or '-'}: {mutant.name}: {how} {mutant.seed}: {found}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
