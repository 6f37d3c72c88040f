"""The setups of suites: medium, nodes and ranks, and their clusters and directories."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import Options
from tests.harness.cluster import Cluster

TMPFS = Path("/dev/shm")
HEADROOM_BYTES = 256 << 20


class Unavailable(Exception):
    """This machine cannot run a suite. The message has the reason."""


@dataclass(frozen=True)
class Setup:
    """`nodes` stores with an agent each, and `ranks` ranks on each node."""

    medium: str
    nodes: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.medium}, {self.nodes} x {self.ranks}"

    @property
    def is_disk(self) -> bool:
        return self.medium == "disk"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks


def setups(options: Options) -> list[Setup]:
    shapes = [(2, 2)] if options.is_quick else [(2, 2), (4, 1)]
    return [Setup(medium, *shape) for medium in options.media for shape in shapes]


@contextmanager
def scratch_folder(options: Options, medium: str, needed_bytes: int) -> Iterator[Path]:
    """A new directory on the medium, removed afterwards. Its name has this process's id (see stale_files.py).

    Raises:
        Unavailable: the medium has too little room, or the directory for the disk is on a tmpfs.
    """
    home = TMPFS if medium == "tmpfs" else options.disk
    if medium == "disk" and kind_of(home) == "tmpfs":
        raise Unavailable(f"{home} is a tmpfs: name a directory on a disk with --disk")
    if shutil.disk_usage(home).free < needed_bytes + HEADROOM_BYTES:
        raise Unavailable(f"{home} has no room for {needed_bytes >> 20} MiB")
    folder = Path(tempfile.mkdtemp(prefix=f"rckpt-bench-{os.getpid()}-", dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def cluster_on(options: Options, setup: Setup, needed_bytes: int) -> Iterator[Cluster]:
    """Nodes with empty stores on the setup's medium. Everything is removed afterwards."""
    with (
        scratch_folder(options, setup.medium, needed_bytes) as folder,
        Cluster(folder / "cluster", setup.nodes, quick_exit=True) as cluster,
    ):
        (cluster.base / "shared").mkdir()
        yield cluster


def kind_of(path: Path) -> str:
    """The type of the file system of a path, by the kernel's name."""
    best, kind = "", "unknown"
    resolved = str(path.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def cores() -> int:
    return len(os.sched_getaffinity(0))
