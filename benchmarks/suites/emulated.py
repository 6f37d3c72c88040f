"""The suite of emulated clusters: how near saves come to the set speeds of the nodes' links and disks."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from benchmarks.options import Options
from benchmarks.suites.paced import paced_disk, why_no_pace
from benchmarks.suites.results import Row
from benchmarks.suites.saving import Case, our_case, rows_in
from benchmarks.suites.setup import Setup, Unavailable, scratch_folder
from tests.harness.cluster import Cluster
from tests.harness.network import AGENTS, network_of, why_no_network

SHARE = 0.13  # share of the time of all suites
NODES, RANKS = 2, 1
_SIZE_BYTES_MAX = 400 << 20
_DISK_SLACK_BYTES = 160 << 20  # for the file system itself and the files of the warm-up


@dataclass(frozen=True)
class Speeds:
    """The speeds of each node in bytes per second: its link, in each direction, and its disk."""

    network: float
    disk: float

    @property
    def name(self) -> str:
        return f"{self.network * 8 / 1e9:g} Gbit/s, {self.disk / 1e6:.0f} MB/s"

    def parts_s(self, node_bytes: float, copies: int) -> tuple[float, float]:
        """The least seconds that a node's disk and network need for `copies` copies of every node's bytes."""
        return copies * node_bytes / self.disk, (copies - 1) * node_bytes / self.network


SPEEDS = (Speeds(125e6, 200e6), Speeds(125e6, 600e6), Speeds(500e6, 200e6))


def emulated_suite(options: Options) -> list[Row]:
    """For each pair of speeds: one copy, and two at two levels of acknowledgement, compared with disk and network."""
    if why := why_no_network() or why_no_pace():
        raise Unavailable(why)
    size_bytes = min(options.size_bytes, _SIZE_BYTES_MAX)
    speeds = SPEEDS[:1] if options.is_quick else SPEEDS
    rows: list[Row] = []
    for pair in speeds:
        rows += _rows(options, pair, size_bytes, options.seconds * SHARE / len(speeds))
    return rows


def _rows(options: Options, speeds: Speeds, size_bytes: int, seconds: float) -> list[Row]:
    setup = Setup(speeds.name, NODES, RANKS)
    cases = [our_case(1), our_case(2, "peer-memory"), our_case(2)]
    with _paced_cluster(options, speeds, 2 * size_bytes + _DISK_SLACK_BYTES) as cluster:
        rows = rows_in(cluster, "emulated", setup, "fsdp2", size_bytes, cases, seconds, rounds=min(options.rounds, 3))
    return [_bounded(row, speeds, cases) for row in rows if row.work != "load"]


def _bounded(row: Row, speeds: Speeds, cases: Sequence[Case]) -> Row:
    """The limit of a save is the longer of its node's disk and link times. The note has both and their sum."""
    copies = next((case["copies"] for case in cases if case["name"] == row.case), None)
    if row.work != "save" or copies is None:
        return replace(row, base="")
    disk_s, network_s = speeds.parts_s(row.state_bytes / NODES, copies)
    if "memory" in row.case:
        disk_s /= copies  # the buddy need not have written its copy yet
    note = f"disk {disk_s:.2f} s, network {network_s:.2f} s, one after the other {disk_s + network_s:.2f} s"
    return replace(row, base="", limit_s=max(disk_s, network_s), note=note)


@contextmanager
def _paced_cluster(options: Options, speeds: Speeds, disk_bytes: int) -> Iterator[Cluster]:
    with ExitStack() as made:
        folder = made.enter_context(scratch_folder(options, "tmpfs", NODES * disk_bytes))
        cluster = Cluster(folder / "cluster", NODES, quick_exit=True)
        (cluster.base / "shared").mkdir()
        for index, node in enumerate(cluster.nodes):
            image = folder / f"disk{index}"
            made.enter_context(paced_disk(image, node.disk, disk_bytes, speeds.disk))
        made.enter_context(network_of(cluster))
        made.enter_context(cluster)  # closed before the network
        for node in cluster.nodes:
            limit_link(str(node.netns), speeds.network)
        yield cluster


def limit_link(netns: str, bytes_per_s: float) -> None:
    """Limits the sending rate of the link of the node's agents, with bursts of 5 ms."""
    rate = ["rate", f"{bytes_per_s * 8:.0f}bit", "burst", f"{bytes_per_s * 0.005:.0f}", "latency", "100ms"]
    command = ["tc", "-n", netns, "qdisc", "add", "dev", AGENTS, "root", "tbf", *rate]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise Unavailable(f"links cannot be shaped here: {done.stderr.strip()}")
