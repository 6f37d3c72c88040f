"""The third and later saves of a job with `keep_last=1`, over recycled files and into new ones.

    python -m benchmarks.suites.recycling [--medium tmpfs] [--copies 2] [--size-mib 954] [--rounds 7] [--disk DIRECTORY]

Two nodes of two ranks. Both ways take turns in one run. CPU seconds are those of all ranks and agents, until the
previous checkpoint is removed.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.options import Options, parsed
from benchmarks.rank import recycling
from benchmarks.rank.recycling import NEW, RECYCLED
from benchmarks.suites.setup import Setup, cluster_on
from tests.harness.cluster import call

_TIMEOUT_S = 900.0
_GENERATIONS = 2


def main() -> int:
    arguments = _arguments()
    options: Options = parsed(["--disk", str(arguments.disk)])
    setup, size_bytes = Setup(arguments.medium, 2, 2), arguments.size_mib << 20
    both = replace(setup, nodes=2 * setup.nodes)
    with cluster_on(options, both, 2 * _GENERATIONS * arguments.copies * size_bytes) as cluster:
        step = call(
            recycling.save_in_turn,
            size_bytes=size_bytes,
            rounds=arguments.rounds,
            copies=arguments.copies,
            other_roots=[str(node.disk) for node in cluster.nodes[setup.nodes :]],
        )
        results = cluster.run(step, nodes=range(setup.nodes), ranks=setup.ranks, timeout_s=_TIMEOUT_S)
    found = results[0]
    print(f"{setup.name}, {found['state_bytes'] / 1e6:.0f} MB, copies={arguments.copies}, {arguments.rounds} rounds")
    _print_table(found["taken"])
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recycling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--medium", choices=("tmpfs", "disk"), default="tmpfs", help="where the stores lie")
    parser.add_argument("--copies", type=int, default=2, help="copies of each shard")
    parser.add_argument("--size-mib", type=int, default=954, help="size of the state over all ranks")
    parser.add_argument("--rounds", type=int, default=7, help="saves that count")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk")
    return parser.parse_args()


def _print_table(taken: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for name in (NEW, RECYCLED):
        seconds = statistics.median(sample["seconds"] for sample in taken[name])
        cpu = statistics.median(_cpu_of(sample) for sample in taken[name])
        print(f"{name:16} {seconds:.3f} s, {cpu:.2f} s of CPU")
    pairs = list(zip(taken[RECYCLED], taken[NEW], strict=True))
    wall = statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)
    cpu = statistics.median(_cpu_of(one) / _cpu_of(other) for one, other in pairs)
    print(f"recycled / new, median of the rounds: {wall:.2f} of the time, {cpu:.2f} of the CPU time")


def _cpu_of(sample: Mapping[str, float]) -> float:
    return sample["rank_cpu_s"] + sample["agent_cpu_s"]


if __name__ == "__main__":
    sys.exit(main())
