"""The cost of TLS: the same saves and loads on two clusters with emulated links, one with TLS and one `--plain`.

    python -m benchmarks.encryption [--gbit 10] [--ranks 1] [--mib 512] [--rounds 5]

Needs root. Stores are in memory, so that no disk hides the cost of encryption. The two clusters take turns.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import parsed
from benchmarks.rank import rounds
from benchmarks.suites.emulated import limit_link
from benchmarks.suites.saving import our_case
from benchmarks.suites.setup import scratch_folder
from tests.harness.cluster import Cluster, call
from tests.harness.network import network_of, why_no_network

NODES = 2
PLAIN, TLS = "plain", "TLS"
_TIMEOUT_S = 300.0
_CASE = our_case(2)
Sample = Mapping[str, float]
Samples = Mapping[str, Mapping[str, list[Sample]]]  # by way, then by work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encryption", description=__doc__.partition("\n")[0])
    parser.add_argument("--gbit", type=float, default=10.0, help="speed of each node's link (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each node (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=512, help="size of the state over all ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="launches for each of the two (default: %(default)s)")
    arguments = parser.parse_args()
    if why := why_no_network():
        print(why, file=sys.stderr)
        return 2
    taken, state_bytes = _taken(arguments)
    shape = f"{NODES} x {arguments.ranks} ranks, {arguments.gbit:g} Gbit/s"
    print(f"{shape}, {state_bytes / 1e6:.0f} MB, {_CASE['name']}")
    _report(taken, state_bytes)
    return 0


def _taken(arguments: argparse.Namespace) -> tuple[Samples, int]:
    size_bytes = arguments.mib << 20
    taken: dict[str, dict[str, list[Sample]]] = {way: {"save": [], "load": []} for way in (PLAIN, TLS)}
    state_bytes = 0
    with ExitStack() as made:
        clusters = {
            way: made.enter_context(_linked(way, arguments.gbit * 125e6, 3 * size_bytes)) for way in (PLAIN, TLS)
        }
        for number in range(arguments.rounds):
            for way in random.Random(number).sample((PLAIN, TLS), 2):
                found = _one(clusters[way], arguments.ranks, size_bytes)
                state_bytes = found["state_bytes"]
                for work in taken[way]:
                    taken[way][work] += found[work][_CASE["name"]]
    return taken, state_bytes


def _one(cluster: Cluster, ranks: int, size_bytes: int) -> Mapping[str, Any]:
    step = call(
        rounds.save_and_load,
        kind="fsdp2", size_bytes=size_bytes, cases=[_CASE], rounds=2, is_disk=False, is_probed=False,
        deadline_s=_TIMEOUT_S,
    )  # fmt: skip
    found = cluster.run(step, nodes=range(NODES), ranks=ranks, timeout_s=_TIMEOUT_S)[0]
    assert found is not None
    return found


@contextmanager
def _linked(way: str, bytes_per_s: float, needed_bytes: int) -> Iterator[Cluster]:
    with ExitStack() as made:
        folder: Path = made.enter_context(scratch_folder(parsed(["--quick"]), "tmpfs", needed_bytes))
        environment = {"REPLICATED_CKPT_PLAIN": "1"} if way == PLAIN else {}
        cluster = Cluster(folder / "cluster", NODES, quick_exit=True, environment=environment)
        (cluster.base / "shared").mkdir()
        made.enter_context(network_of(cluster))
        made.enter_context(cluster)  # closed before the network
        for node in cluster.nodes:
            limit_link(str(node.netns), bytes_per_s)
        yield cluster


def _report(taken: Samples, state_bytes: int) -> None:
    print(f"{'':6}{'':8}{'MB/s':>8}{'spread':>14}{'rank CPU s/GB':>16}{'agent CPU s/GB':>16}")
    for work in ("save", "load"):
        for way in (PLAIN, TLS):
            samples = taken[way][work]
            speeds = sorted(state_bytes / 1e6 / sample["seconds"] for sample in samples)
            cpu = [
                statistics.median(sample[f"{who}_cpu_s"] for sample in samples) / state_bytes * 1e9
                for who in ("rank", "agent")
            ]
            spread = f"{speeds[0]:.0f}-{speeds[-1]:.0f}"
            print(f"{work:6}{way:8}{statistics.median(speeds):8.0f}{spread:>14}{cpu[0]:16.2f}{cpu[1]:16.2f}")
        medians = [statistics.median(sample["seconds"] for sample in taken[way][work]) for way in (PLAIN, TLS)]
        print(f"{work}: TLS takes {medians[1] / medians[0]:.2f} times as long")


if __name__ == "__main__":
    sys.exit(main())
