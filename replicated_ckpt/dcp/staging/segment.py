"""Memory of staged tensors: one segment per save under way, which the process keeps from save to save.

A first write to fresh memory takes several times as long as later ones, so a segment is mapped once and used again. It is
a memfd, so that the agent, another process, can map it.
"""

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.files.direct import address_of

log = logging.getLogger(__name__)

_PORTABLE = 1
"""For every GPU of this process: `cudaHostRegisterPortable` of the CUDA runtime API."""


class PinnedPages:
    """Pins all pages of a piece of memory, until `free` or the end of this object. Free it before the memory is moved
    or released.
    """

    def __init__(self, memory: memoryview) -> None:
        """Raises MemoryError: the system or the driver refuses; the memory is unchanged."""
        address = address_of(memory)
        code = int(_cudart().cudaHostRegister(address, len(memory), _PORTABLE))
        if code != 0:
            # The error would otherwise be raised by the training's next kernel.
            _clear_error()
            raise MemoryError(f"CUDA does not pin {len(memory):,} bytes of memory: error {code}")
        self._memory = memory  # keeps it mapped until the finalizer has run
        self.free = weakref.finalize(self, _unregister, os.getpid(), address)
        # At exit the CUDA driver may be gone already, and the call would crash.
        self.free.atexit = False


def _unregister(pid: int, address: int) -> None:
    """Does nothing in a forked child: the pinned pages are its parent's."""
    if os.getpid() == pid:
        _cudart().cudaHostUnregister(address)


def _clear_error() -> None:
    """CUDA keeps the last error for its next caller, which would be a kernel of the training."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_IDLE_MAX = 1
"""Idle segments that are kept when another one is leased: two writers that save in turn have one each."""


class StagingRefused(ReplicatedCkptError):
    """The state cannot be copied, or its copy takes more memory than this rank may take. No memory is held."""

    default_hint = "Save with dcp.save, which needs no copy; or raise the memory limit of the container."


class Segment:
    """Shared memory without a name, mapped once."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptor = os.memfd_create("replicated-ckpt-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size_bytes)
        self._memory = mmap.mmap(self.descriptor, size_bytes)  # it duplicates the descriptor
        self._pinned: PinnedPages | None = None
        self._is_to_be_pinned = True
        self.is_kept = True
        """Whether the segment becomes idle when its lease ends. Otherwise it is freed."""
        self._ask_for_huge_pages()

    @property
    def size_bytes(self) -> int:
        return len(self._memory)

    def grow(self, size_bytes: int) -> None:
        """Enlarges the segment, whose touched pages stay warm. Call it only without a live lease."""
        # Resizing moves the mapping: pages that are still pinned would be unpinned at the wrong address.
        if self._pinned is not None:
            self._pinned.free()
        self._pinned, self._is_to_be_pinned = None, True
        self._memory.resize(size_bytes)
        self._ask_for_huge_pages()

    def lease(self) -> memoryview:
        """A view of the whole segment, for one save. When the last tensor over this view is gone, the segment is idle
        again.
        """
        view = memoryview(self._memory)
        _leased[id(view)] = self
        weakref.finalize(view, _give_back, self, os.getpid(), id(view)).atexit = False
        return view

    def pin(self) -> None:
        """Pins it, so that GPUs copy directly into it. If CUDA refuses, they copy through their own buffers."""
        # Once per size: a driver that has refused would refuse again, with a warning, at each save.
        if self._is_to_be_pinned:
            self._is_to_be_pinned = False
            try:
                self._pinned = PinnedPages(memoryview(self._memory))
            except MemoryError as exc:
                log.warning("%s. A GPU copies more slowly to unpinned memory.", exc)

    def _ask_for_huge_pages(self) -> None:
        with contextlib.suppress(OSError):  # not every kernel has them for shared memory
            self._memory.madvise(mmap.MADV_HUGEPAGE)


_idle: list[Segment] = []
_leased: dict[int, Segment] = {}
_taking = threading.Lock()


def lease_segment(size_bytes: int, available_bytes: Callable[[], int]) -> memoryview:
    """Memory of at least this size that no other save uses: an idle segment, grown if it is too small, or a new one.

    If it needs new memory, it takes at most what `available_bytes` returns.

    Raises:
        StagingRefused: the limit or the system does not allow it. Nothing was taken.
    """
    size_bytes = -(-max(1, size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _taking:
        idle = sorted(_idle, key=lambda segment: segment.size_bytes)  # a copy: `_give_back` may add one meanwhile
        # The largest idle one is grown: that needs the least fresh memory.
        found = next((segment for segment in idle if segment.size_bytes >= size_bytes), idle[-1] if idle else None)
        missing = size_bytes - (0 if found is None else found.size_bytes)
        try:
            if missing > 0 and missing > (available := available_bytes()):
                raise StagingRefused(
                    f"A copy of the state needs {missing:,} more bytes of memory, but this rank may take {available:,}."
                )
            if found is not None:
                idle.remove(found)
                for taken in (found, *idle[: max(0, len(idle) - _IDLE_MAX)]):
                    _idle.remove(taken)
            return _prepare(found, size_bytes).lease()
        except (OSError, MemoryError) as exc:  # with StagingRefused, the save continues without a copy
            raise StagingRefused(
                f"A copy of the state needs {missing:,} more bytes of memory, but the system gives none: {exc}."
            ) from exc


def _prepare(found: Segment | None, size_bytes: int) -> Segment:
    if found is None:
        return Segment(size_bytes)
    if found.size_bytes < size_bytes:
        found.grow(size_bytes)
    return found


def descriptor_of(lease: memoryview) -> int:
    """The descriptor of the leased memory: a process that receives it reads the same bytes."""
    return _leased[id(lease)].descriptor


def pin_lease(lease: memoryview) -> None:
    """Pins the leased segment, as `Segment.pin`."""
    _leased[id(lease)].pin()


def drop_idle_segments() -> None:
    """Frees idle segments. A segment in use is freed once nothing refers to its copy."""
    with _taking:
        for segment in list(_leased.values()):
            segment.is_kept = False
        _idle.clear()


def _give_back(segment: Segment, pid: int, lease: int) -> None:
    """Makes the segment of a lease idle. It takes no lock, because it runs wherever the last tensor dies, perhaps while
    this thread holds `_taking`.

    In a forked child the memory is the parent's: a child that reused it would overwrite the parent's copy.
    """
    _leased.pop(lease, None)
    if os.getpid() == pid and segment.is_kept:
        _idle.append(segment)


def _begin_anew() -> None:
    """In a forked child: idle segments are the parent's, and the thread that held the lock exists only there."""
    global _taking  # noqa: PLW0603 - the one of this process
    _idle.clear()
    _taking = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_KEPT_FREE = 10
"""This fraction, one tenth, of the available memory is left to other processes."""
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes its largest number if there is no limit."""


_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE")
"""Where torchrun, Open MPI, MPICH and Slurm put the number of ranks on a node. The first variable that is set counts."""


def share_of_rank(environment: Mapping[str, str] | None = None) -> int:
    """Bytes that one rank may take: the ranks of a node stage at the same time, so each takes only its share."""
    return takeable_bytes() // _count_local_ranks(os.environ if environment is None else environment)


def takeable_bytes() -> int:
    """All available memory, less the part that is left to other processes."""
    available = available_bytes()
    return available - available // _KEPT_FREE


def _count_local_ranks(environment: Mapping[str, str]) -> int:
    """The largest number on any node of the job; 1 if no variable is set. Slurm writes `8(x3),4`."""
    counted = next((environment[name] for name in _LOCAL_RANKS if environment.get(name)), "")
    counts = [word.partition("(")[0] for word in counted.split(",")]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The machine's MemAvailable, or less if a cgroup of this process leaves less. Page cache does not count as used."""
    machine = _numbers((proc / "meminfo").read_text(encoding="ascii"))["MemAvailable:"] << 10
    return min([machine, *(max(0, left) for left in _left_by_cgroups(proc, cgroups))])


def _left_by_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """The memory that is left in each cgroup with a limit, from this process's own up. A container may see only the
    topmost.
    """
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
    except OSError:  # the topmost cgroup has no limit; in a container, other cgroups may be missing or unreadable
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
