"""Memory that staged tensors lie in: one segment per save under way, kept by the process from save to save.

Fresh memory costs several times what used memory does, so a segment is mapped once and used again. It is a memfd: another
process can map it, too.
"""

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.files.direct import address_of

_PORTABLE = 1
"""For every GPU of this process: `cudaHostRegisterPortable` of the CUDA runtime API."""


class PinnedPages:
    """All pages of a piece of memory, until `free` or the end of this object: before the memory moves or goes."""

    def __init__(self, memory: memoryview) -> None:
        """Raises MemoryError: the system or the driver refuses, and the memory is as it was."""
        address = address_of(memory)
        code = int(_cudart().cudaHostRegister(address, len(memory), _PORTABLE))
        if code != 0:
            _clear_error()
            raise MemoryError(f"CUDA does not pin {len(memory):,} bytes of memory: error {code}")
        self._memory = memory  # it is not unmapped before the finalizer has run
        self.free = weakref.finalize(self, _unregister, os.getpid(), address)
        self.free.atexit = False


def _unregister(pid: int, address: int) -> None:
    """In a process that was forked they are its parent's."""
    if os.getpid() == pid:
        _cudart().cudaHostUnregister(address)


def _clear_error() -> None:
    """CUDA keeps the last error for what asks next, which would be a kernel of the training."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


log = logging.getLogger(__name__)

_IDLE_MAX = 1
"""Idle segments that outlast the taking of another one: two writers that save by turns have one each."""


class StagingRefused(ReplicatedCkptError):
    """The state cannot be copied, or its copy takes more memory than this rank may take. None is held."""

    default_hint = "Save with dcp.save, which needs no copy; or raise the memory limit of the container."


class Segment:
    """Shared memory without a name, mapped once."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptor = os.memfd_create("replicated-ckpt-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size_bytes)
        self._memory = mmap.mmap(self.descriptor, size_bytes)  # with a descriptor of its own
        self._pinned: PinnedPages | None = None
        self._is_to_be_pinned = True
        self.is_kept = True
        """Whether it is idle, and not freed, once it is given back."""
        self._ask_for_huge_pages()

    @property
    def size_bytes(self) -> int:
        return len(self._memory)

    def grow(self, size_bytes: int) -> None:
        """Only while no lease of it lives. What was touched before is not fresh memory again."""
        if self._pinned is not None:
            self._pinned.free()
        self._pinned, self._is_to_be_pinned = None, True
        self._memory.resize(size_bytes)
        self._ask_for_huge_pages()

    def lease(self) -> memoryview:
        """All of it, for one save. When the last tensor over this very view is gone, the segment is idle again."""
        view = memoryview(self._memory)
        _leased[id(view)] = self
        weakref.finalize(view, _give_back, self, os.getpid(), id(view)).atexit = False
        return view

    def pin(self) -> None:
        """Has GPUs copy straight to it, from save to save. Where CUDA refuses that they do so through its own buffers."""
        if self._is_to_be_pinned:
            self._is_to_be_pinned = False
            try:
                self._pinned = PinnedPages(memoryview(self._memory))
            except MemoryError as exc:
                log.warning("%s. A GPU copies more slowly to what is not pinned.", exc)

    def _ask_for_huge_pages(self) -> None:
        with contextlib.suppress(OSError):  # not every kernel has them for shared memory
            self._memory.madvise(mmap.MADV_HUGEPAGE)


_idle: list[Segment] = []
_leased: dict[int, Segment] = {}
_taking = threading.Lock()


def lease_segment(size_bytes: int, available_bytes: Callable[[], int]) -> memoryview:
    """At least so many bytes that no other save uses: an idle segment, grown if it is too small, or a new one.

    Memory is taken only if `available_bytes`, asked when more is needed than lies idle, allows it.

    Raises:
        StagingRefused: it does not, or the system refuses it. Nothing was taken.
    """
    size_bytes = -(-max(1, size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _taking:
        idle = sorted(_idle, key=lambda segment: segment.size_bytes)  # a copy: `_give_back` may add one meanwhile
        found = next((segment for segment in idle if segment.size_bytes >= size_bytes), idle[-1] if idle else None)
        missing = size_bytes - (0 if found is None else found.size_bytes)
        try:
            if missing > 0 and missing > (available := available_bytes()):
                raise StagingRefused(
                    f"A copy of the state takes {missing:,} more bytes of memory, and this rank may take {available:,}."
                )
            if found is not None:
                idle.remove(found)
                for taken in (found, *idle[: max(0, len(idle) - _IDLE_MAX)]):
                    _idle.remove(taken)
            return _prepare(found, size_bytes).lease()
        except (OSError, MemoryError) as exc:  # an error of this rank alone would leave the others waiting for it
            raise StagingRefused(
                f"A copy of the state takes {missing:,} more bytes of memory, and the system gives none: {exc}."
            ) from exc


def _prepare(found: Segment | None, size_bytes: int) -> Segment:
    if found is None:
        return Segment(size_bytes)
    if found.size_bytes < size_bytes:
        found.grow(size_bytes)
    return found


def descriptor_of(lease: memoryview) -> int:
    """The descriptor of the memory that is leased: another process that is given it reads the same bytes."""
    return _leased[id(lease)].descriptor


def pin_lease(lease: memoryview) -> None:
    """As `Segment.pin`, of the segment that is leased."""
    _leased[id(lease)].pin()


def drop_idle_segments() -> None:
    """Gives their memory back. Of those in use each goes once nothing refers to what was copied there."""
    with _taking:
        for segment in list(_leased.values()):
            segment.is_kept = False
        _idle.clear()


def _give_back(segment: Segment, pid: int, lease: int) -> None:
    """Runs wherever the last tensor dies, in the middle of anything: so it takes no lock.

    After a fork the memory is the parent's: what the child gave back, it would write over.
    """
    _leased.pop(lease, None)
    if os.getpid() == pid and segment.is_kept:
        _idle.append(segment)


def _begin_anew() -> None:
    """In a forked child: idle segments are the parent's, and so was the thread that may have held the lock."""
    global _taking  # noqa: PLW0603 - the one of this process
    _idle.clear()
    _taking = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
