"""`make fuzz [SECONDS=600] [ARGS="--target pickle --inputs 1000000 --seed 7"]`"""

import argparse
import random
import sys

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Fuzzes everything that reads bytes from outside.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (default: %(default)s)")
    parser.add_argument("--inputs", type=int, help="the number of inputs of each target, without a time limit")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="can be repeated (default: all targets)"
    )
    parser.add_argument("--seed", type=int, help="random by default, and printed")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    targets = options.target or list(TARGETS)
    seconds = float("inf") if options.inputs else options.seconds / len(targets)
    failed = []
    for target in targets:
        outcome = run(target, seed, seconds=seconds, inputs=options.inputs)
        said = ", ".join(f"{word} {count}" for word, count in sorted(outcome.said.items()))
        print(f"{target}: {outcome.inputs} inputs from seed {seed}: {said}", flush=True)
        failed += outcome.failed
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
