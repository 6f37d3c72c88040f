"""The memory that this process may still take: what the machine has, and what its cgroups leave of it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_KEPT_FREE = 10
"""One part in so many of the available memory is left to other processes."""
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes its largest number in place of no limit."""


_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE")
"""Where torchrun, Open MPI, MPICH and Slurm put the number of ranks on a node: the first that is set counts."""


def share_of_rank(environment: Mapping[str, str] | None = None) -> int:
    """Bytes that one rank may take: ranks of one node stage at the same time, so each takes its part only."""
    return takeable_bytes() // _count_local_ranks(os.environ if environment is None else environment)


def takeable_bytes() -> int:
    """All available memory, less the part that is left to other processes."""
    available = available_bytes()
    return available - available // _KEPT_FREE


def _count_local_ranks(environment: Mapping[str, str]) -> int:
    """The largest number on any node of the job; 1 if no variable is set. Slurm writes `8(x3),4`."""
    said = next((environment[name] for name in _LOCAL_RANKS if environment.get(name)), "")
    counts = [word.partition("(")[0] for word in said.split(",")]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The least of the machine's MemAvailable and what each limit above this process leaves, page cache not counted."""
    machine = _numbers((proc / "meminfo").read_text(encoding="ascii"))["MemAvailable:"] << 10
    return min([machine, *(max(0, left) for left in _left_by_cgroups(proc, cgroups))])


def _left_by_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """The memory that each cgroup with a limit leaves, from this process's own up. A container may see only the topmost."""
    try:
        lines = os.fsdecode((proc / "self" / "cgroup").read_bytes()).rstrip("\n").split("\n")
    except FileNotFoundError:  # a kernel without cgroups
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        # Hierarchy 0 is cgroup v2; in hybrid systems the memory controller may still be in v1.
        if number == "0":
            names, root, prefix = ("memory.max", "memory.current"), cgroups, ""
        elif "memory" in controllers.split(","):
            names, root, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), cgroups / "memory", "total_"
        else:
            continue
        inside = Path(path.lstrip("/"))
        # Each ancestor's limit counts, too: the least of them kills the process.
        for folder in (inside, *inside.parents):
            left = _left_by(root / folder, *names, prefix)
            if left is not None:
                yield left


def _left_by(folder: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = int((folder / usage_name).read_text(encoding="ascii"))
        counts = _numbers((folder / "memory.stat").read_text(encoding="ascii"))
    except OSError:  # the topmost cgroup has no limit, and a container sees no other's, or may not look at it
        return None
    if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
        return None
    # The kernel drops page cache before it kills: counted as used, a node that has just saved would seem full.
    page_cache = counts.get(f"{prefix}inactive_file", 0) + counts.get(f"{prefix}active_file", 0)
    return int(limit) - usage + page_cache


def _numbers(text: str) -> Mapping[str, int]:
    """The second word of each line by the first."""
    words = (line.split() for line in text.splitlines())
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdecimal()}
