"""A checkpoint at every step in the memory of the node and of its buddy: its cost for training, and loads from there.

    python -m benchmarks.suites.memory_tier [--size-mib 48] [--steps 100] [--step-s 0.3] [--disk-every 10] [--loads 7]

Two nodes of one rank, memory tiers in /dev/shm, disks in --disk.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import parsed
from benchmarks.rank import memory_tier
from benchmarks.suites.setup import Setup, cluster_on, scratch_folder
from tests.harness.cluster import call
from tests.harness.node import Node

_TIMEOUT_S = 900.0
_GENERATIONS = 4


def main() -> int:
    arguments = _arguments()
    options = parsed(["--disk", str(arguments.disk)])
    size_bytes = arguments.size_mib << 20
    needed = 2 * _GENERATIONS * size_bytes
    with (
        scratch_folder(options, "tmpfs", needed) as folder,
        cluster_on(options, Setup(arguments.medium, 2, 1), needed) as cluster,
    ):
        cluster.nodes += [Node(folder / f"memory{index}", folder / f"memory{index}") for index in range(2)]
        step = call(
            memory_tier.save_every_step,
            size_bytes=size_bytes,
            steps=arguments.steps,
            step_s=arguments.step_s,
            disk_every=arguments.disk_every,
            loads=arguments.loads,
        )
        results = cluster.run(step, nodes=[0, 1], timeout_s=_TIMEOUT_S)
    _print_table(arguments, results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="memory_tier", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=48, help="size of the state over all ranks")
    parser.add_argument("--steps", type=int, default=100, help="number of steps; each is saved")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds of a step without its save")
    parser.add_argument("--disk-every", type=int, default=10, help="every so many saves go to the disk, too")
    parser.add_argument("--loads", type=int, default=7, help="loads of the last step, compared with plain copies")
    parser.add_argument("--medium", choices=("tmpfs", "disk"), default="disk", help="where the disks' stores lie")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk")
    return parser.parse_args()


def _print_table(arguments: argparse.Namespace, results: Sequence[Mapping[str, Any]]) -> None:
    steps, size = arguments.steps, results[0]["state_bytes"]
    print(f"{size / 1e6:.0f} MB on 2 nodes, {steps} steps of {arguments.step_s:g} s, a save each")
    copied, behind = min(one["copied"] for one in results), max(one["behind"] for one in results)
    print(f"in the buddy's memory: {copied} of {steps} steps; {behind} were not when the next one was saved")
    blocked = sorted(max(pair) for pair in zip(*(one["blocked"] for one in results), strict=True))
    p99 = blocked[min(len(blocked) - 1, len(blocked) * 99 // 100)]
    print(f"async_save held training up for {statistics.median(blocked):.3f} s (median), {p99:.3f} s (p99)")
    used = max(one["most_used_bytes"] for one in results)
    print(f"memory of a node's tier: {used / 1e6:.0f} MB at most, {used / size:.2f} x the state")
    loads = [_slowest(each) for each in zip(*(one["loads"] for one in results), strict=True)]
    for name, key in (("a whole load", "load_s"), ("reading alone", "read_s")):
        ratio = statistics.median(one["copy_s"] / one[key] for one in loads)
        seconds = statistics.median(one[key] for one in loads)
        copy_s = statistics.median(one["copy_s"] for one in loads)
        print(f"{name} from memory: {seconds:.3f} s, a plain copy {copy_s:.3f} s: {ratio:.2f} of its speed")


def _slowest(ranks: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    return {key: max(one[key] for one in ranks) for key in ranks[0]}


if __name__ == "__main__":
    sys.exit(main())
