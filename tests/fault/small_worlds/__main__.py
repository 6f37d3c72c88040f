"""`python -m tests.fault.small_worlds` searches the small worlds completely, and prints the number of states."""

import argparse
import sys

from tests.fault.small_worlds.mending import ONE_RUN, TWO_RUNS
from tests.fault.small_worlds.rules import OldRules, PackageRules
from tests.fault.small_worlds.search import Search
from tests.fault.small_worlds.world import PAIRS, RING, World, first

WORLDS = {
    "ring": first(RING),
    "adopting": first(RING, adopting=1),
    "pairs": first(PAIRS),
    "two-runs": first(RING, away=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.small_worlds", description=__doc__)
    parser.add_argument(
        "--old-rules", action="store_true", help="use the rules from before the protocol had invariants"
    )
    parser.add_argument("--atomic", action="store_true", help="a node asks all others at once")
    parser.add_argument("--states", type=int, help="the most states of each world")
    parser.add_argument(
        "--outcome", action="store_true", help="check only for lost checkpoints, not for the invariants"
    )
    parser.add_argument(
        "--loss", action="store_true", help="any one node may be lost with its disk; for ring and pairs"
    )
    parser.add_argument(
        "--back", action="store_true", help="the coordinator's disk may be restored from before the save"
    )
    parser.add_argument("--world", choices=WORLDS, help="search only this world")
    arguments = parser.parse_args()
    code = 0
    for name, begin in WORLDS.items():
        if arguments.world not in (None, name):
            continue
        layout = PAIRS if len(begin.nodes) == len(PAIRS.placed) else RING
        runs = TWO_RUNS if name == "two-runs" else ONE_RUN
        rules = OldRules(runs) if arguments.old_rules else PackageRules(runs)
        away = 2 if name == "two-runs" else None
        world = World(layout, rules, is_atomic=arguments.atomic, may_go_back=arguments.back, away=away)
        found = Search(world, arguments.states, arguments.outcome, arguments.loss).run(begin)
        print(f"{name}: {found.states} states, {found.steps} steps, {found.seconds:.0f} s; ", end="")
        print(f"{found.acknowledged} with the new version acknowledged, {found.dropped} drops of it; ", end="")
        print(found.broken or "all invariants hold", flush=True)
        for step in found.trace:
            print(f"    {step}")
        code |= bool(found.broken)
    return code


if __name__ == "__main__":
    sys.exit(main())
