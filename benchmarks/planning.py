"""The coordinator's work for many ranks and items, with synthetic plans: ours compared with stock torch's.

    python -m benchmarks.planning [--ranks 64,256,1024] [--items 10000,100000] [--nodes 1000] [--quick] [--json FILE]

Varies the ranks with the fewest items, then the items with the fewest ranks. Prints for each step the CPU time, the
nanoseconds per item or rank, the exponent of growth (1.0 is linear) and the peak memory. Then opens and publishes a save
on `--nodes` fake agents, with none and with 50 of them hanging.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.planning_agents import published
from benchmarks.planning_steps import Measured, measured
from benchmarks.planning_world import World

_BY_RANK = ("decide", "read posts", "tell decision", "a rank: decision", "survey", "a rank: survey")
HANGING = 50
METADATA_BYTES = 4_000_000


def main() -> int:
    options = _options()
    ranks, items = sorted(options.ranks), sorted(options.items)
    by_ranks = [World(count, max(items[0], count), options.ranks_per_node) for count in ranks]
    by_items = [World(ranks[0], count, options.ranks_per_node) for count in items]
    found: dict[World, Measured] = {}
    for title, worlds in (("ranks", by_ranks), ("items", by_items)):
        for world in worlds:
            if world not in found:
                found[world] = _run(world, options.rounds, with_memory=not options.no_memory)
        _print_growth(title, [found[world] for world in worlds])
    _print_sizes(list(found.values()))
    publishing = _published(options.nodes, 0 if options.quick else min(HANGING, options.nodes // 20))
    if options.json:
        document = {"steps": [asdict(run) for run in found.values()], "publishing": publishing}
        options.json.write_text(json.dumps(document, indent=1))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="planning", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=_numbers, default=[64, 256, 1024], help="numbers of ranks")
    parser.add_argument(
        "--items", type=_numbers, default=[10_000, 100_000], help="numbers of items, all ranks together"
    )
    parser.add_argument("--ranks-per-node", type=int, default=8, help="1 is the most work for one number of ranks")
    parser.add_argument("--nodes", type=int, default=1000, help="fake agents that a save is published on")
    parser.add_argument("--rounds", type=int, default=3, help="each time is the best of so many")
    parser.add_argument("--no-memory", action="store_true", help="do not run each step again to trace its memory")
    parser.add_argument("--quick", action="store_true", help="only a test that everything runs, in a few seconds")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.items, options.nodes, options.rounds = [8, 32], [64, 256], 20, 1
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _run(world: World, rounds: int, *, with_memory: bool) -> Measured:
    """The best time of each step, because other processes use the machine too."""
    runs = [measured(world, with_memory=with_memory and not at) for at in range(rounds)]
    best = runs[0]
    best.seconds = {name: min(run.seconds[name] for run in runs) for name in best.seconds}
    return best


def _print_growth(title: str, runs: Sequence[Measured]) -> None:
    print(
        f"\nGrowing {title}, nodes of {runs[0].world.ranks_per_node} ranks: ms of CPU, then per rank or item at the largest"
    )
    heads = [f"{run.world.ranks}x{run.world.items}" for run in runs]
    print(f"{'step':22}" + "".join(f"{head:>14}" for head in heads) + f"{'ns each':>12}{'exponent':>10}{'peak MB':>9}")
    for name in runs[0].seconds:
        per = [run.world.ranks if name in _BY_RANK else run.world.items for run in runs]
        times = [run.seconds[name] for run in runs]
        grown = [run.world.ranks if title == "ranks" else run.world.items for run in runs]
        cells = "".join(f"{1e3 * seconds:>14.1f}" for seconds in times)
        peak = runs[-1].peak_bytes.get(name, 0) / 1e6
        print(f"{name:22}{cells}{1e9 * times[-1] / per[-1]:>12.0f}{_exponent(grown, times):>10.2f}{peak:>9.1f}")


def _exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent of growth: the slope of a line through the logarithms of size and time."""
    if len(set(sizes)) < 2:
        return math.nan
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(t) for t in seconds]).slope


def _print_sizes(runs: Sequence[Measured]) -> None:
    print(f"\n{'bytes':22}{'metadata':>12}{'an item':>9}{'manifest':>12}{'a rank':>9}{'decision':>12}{'survey':>12}")
    for run in runs:
        sizes, world = run.sizes, run.world
        an_item, a_rank = sizes["metadata"] / world.items, sizes["manifest"] / world.ranks
        print(
            f"{f'{world.ranks} x {world.items}':22}{sizes['metadata']:>12}{an_item:>9.0f}"
            f"{sizes['manifest']:>12}{a_rank:>9.0f}{sizes['decision']:>12}{sizes['survey']:>12}"
        )


def _published(nodes: int, hung: int) -> dict[str, Sequence[float]]:
    print(f"\n{nodes} agents that answer after 10 ms, .metadata of {METADATA_BYTES / 1e6:.0f} MB")
    print(f"{'':22}{'open, s':>12}{'publish, s':>12}{'sent, MB':>12}{'directly':>12}")
    found: dict[str, Sequence[float]] = {}
    for count in sorted({0, hung}):
        found[f"{count} hang"] = figures = published(nodes, count, METADATA_BYTES)
        direct = METADATA_BYTES * (nodes - 1) / 1e6
        print(f"{f'{count} hang':22}" + "".join(f"{figure:>12.2f}" for figure in figures) + f"{direct:>12.0f}")
    return found


if __name__ == "__main__":
    sys.exit(main())
