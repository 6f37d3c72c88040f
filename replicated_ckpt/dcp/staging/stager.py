"""Stages the asynchronous saves of one writer, one at a time. If there is no memory for a copy, a save works without it."""

import gc
import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from replicated_ckpt.dcp.runtime.torch_private import AsyncCall, find_async_call, flattening_holds_tensors
from replicated_ckpt.dcp.runtime.user_code import describe_failure
from replicated_ckpt.dcp.staging.segment import (
    StagingRefused,
    drop_idle_segments,
    lease_segment,
    pin_lease,
    share_of_rank,
)
from replicated_ckpt.dcp.staging.state_copy import StateCopy
from replicated_ckpt.dcp.tensors.tensor_memory import DeviceCopies
from replicated_ckpt.errors import RankFailed

log = logging.getLogger(__name__)

BEGIN_TIMEOUT_S = 30.0
RETURN_WAIT_S = 0.05
"""How long the saving thread waits for `dcp.async_save` to return. Otherwise the training thread would wait up to 5 ms
(`sys.getswitchinterval`) for the saving thread to release the interpreter lock."""
_POLL_S = 0.02


_last_by_group: "weakref.WeakValueDictionary[str, Stager]" = weakref.WeakValueDictionary()
"""By process group: the stager that staged last. Two saves in one group at once would mix their collectives."""


def await_turn(group_name: str) -> None:
    """Returns once no other thread of this process runs an asynchronous save in this group."""
    last = _last_by_group.get(group_name)
    if last is not None:
        last.wait_for_last()


class _SaveBehind:
    """An asynchronous save under way. It refers weakly to the future, whose error may hold the copied state.

    In a forked child no thread would end the save, so there is nothing to wait for.
    """

    def __init__(self, future: "Future[Any]") -> None:
        self._future = weakref.ref(future)
        self._pid = os.getpid()
        self._failure = ""

    def note_end(self, future: "Future[Any]") -> None:
        """A callback of the future. It may run after the waiters of the future have continued, so it changes only this
        object.
        """
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._failure = describe_failure(error)
            log.warning("an asynchronous save of this rank failed, as its future also reports: %s", self._failure)

    def wait_for_end(self, timeout_s: float) -> None:
        future = self._find()
        if future is not None:
            future.result(timeout_s)
        elif self._failure:
            raise RankFailed(f"The last asynchronous save failed: {self._failure}")

    def is_over(self) -> bool:
        future = self._find()
        return future is None or future.done()

    def _find(self) -> "Future[Any] | None":
        return self._future() if os.getpid() == self._pid else None


class Stager:
    """Copies states for `dcp.async_save`. One save at a time: `stage` waits until the previous save has ended.

    The save has ended when the future of `dcp.async_save` is done. If the future is unknown, the save has ended when no
    tensor of the copy is left, or when the thread that saved has ended. It also counts as ended if no thread began to
    save within 30 s of the copy. A copy that something still refers to is never overwritten: the next save gets new memory.

    With `overlaps`, GPUs still copy when `stage` returns: call `hold_until_copied` before the state changes.
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._copies = DeviceCopies(())
        self._staged_at = float("-inf")
        self._lease: weakref.ref[memoryview] | None = None
        self._behind: _SaveBehind | None = None
        self._asked_by: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._is_uncopied = False
        self._is_staged = self._needs_group = False
        self._written = threading.Event()
        self._returns = threading.Event()
        self._returns.set()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state. Or the state itself, if it cannot be copied: `synchronize` then waits for the write.

        Raises:
            StagingRefused: the state does not fit or cannot be copied, and the caller is not `dcp.async_save`.
        """
        self.wait_for_last()
        # Reset before anything can raise: a failed staging must not leave the marks of the save before.
        self._asked_by, self._thread, self._lease, self._behind = None, None, None, None
        self._is_uncopied = self._is_staged = self._needs_group = False
        self._written.clear()
        call = find_async_call()
        group_name = _find_group(call)
        if group_name is not None:
            await_turn(group_name)
        staged = self._copy(state_dict, call)
        if call is not None and not call.in_process:
            self._asked_by = threading.current_thread()
        if group_name is not None:
            self._needs_group = True
            _last_by_group[group_name] = self
        self._returns.clear()
        return staged

    def _copy(self, state_dict: dict[str, Any], call: AsyncCall | None) -> dict[str, Any]:
        if call is not None and call.in_process:
            state_copy = StateCopy(state_dict)
            staged = state_copy.make(None)  # DCP moves each storage into shared memory itself
            state_copy.copies.wait_for_copies()
            return staged
        try:
            return self._copy_to_segment(state_dict)
        except StagingRefused as exc:
            if call is None:
                raise
            log.warning("%s Training waits in async_save until this rank has written its shard.", exc.message)
            self._is_uncopied = True
            # The saving thread does not use the training's streams: the state must be complete before that thread reads it.
            await_device()
            return state_dict

    def _copy_to_segment(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        try:
            state_copy = StateCopy(state_dict)
            memory = lease_segment(state_copy.size_bytes, share_of_rank)
            if state_copy.is_on_gpu:
                pin_lease(memory)
            staged = state_copy.make(memory)
            self._copies = state_copy.copies
            if not self._overlaps:
                self.await_copy()
        except StagingRefused:
            raise
        except Exception as exc:  # any class's own code runs
            raise StagingRefused(f"The state cannot be copied: {describe_failure(exc).rstrip('.')}.") from exc
        # Weak: a strong reference to the lease would keep the segment from ever becoming idle.
        self._lease, self._staged_at, self._is_staged = weakref.ref(memory), time.monotonic(), True
        return staged

    def hold_until_copied(self) -> None:
        """Work that is queued on GPUs' current streams from here on waits for the copy. This call does not wait."""
        self._copies.hold_streams()

    def await_copy(self) -> None:
        """Returns once the staged state is copied. Raises RuntimeError, of CUDA."""
        self._copies.wait_for_copies()

    def wait_for_staging(self, timeout_s: float) -> None:
        """Returns when the future of the last `dcp.async_save` is done; raises its error, or TimeoutError.

        Raises RankFailed with the error's text if the caller of `dcp.async_save` has not kept the future. The thread that
        saves does not wait for itself.
        """
        # `on_save` runs in the thread that saves: waiting for its own save there would never end.
        if self._behind is not None and self._thread is not threading.current_thread():
            self._behind.wait_for_end(timeout_s)

    def synchronize(self) -> None:
        """When this returns, the original may change. If it was not copied, this waits until its write has ended or
        failed.
        """
        self._returns.set()
        call = find_async_call()
        if call is None or call.future is None:
            return
        # Only a weak reference: a future that is kept alive keeps its error, and with it the state.
        self._behind = _SaveBehind(call.future)
        call.future.add_done_callback(self._behind.note_end)
        # By polling: a save that fails before it writes sets only the future.
        while self._is_uncopied and not self._written.wait(_POLL_S) and not call.future.done():
            pass

    def follow(self, future: "Future[Any]") -> None:
        """Records that another thread saves the staged state. That save has ended when this future is done."""
        self._returns.set()
        self._asked_by = threading.current_thread()
        self._behind = _SaveBehind(future)

    def begin_save(self) -> None:
        """The calling thread begins to save the staged state. If it is the thread that staged, it begins another,
        synchronous save, and this first waits for the asynchronous one.

        Torch 2.7 and 2.8 also get here in `dcp.async_save`, before they stage: this only waits for the save before.
        """
        if find_async_call() is not None:
            self.wait_for_last()
            return
        if self._asked_by is threading.current_thread():
            self.wait_for_last()
            self._asked_by, self._is_staged, self._needs_group = None, False, False
            self._behind = None  # `wait_for_staging` waits only for the last save
        else:
            self._returns.wait(RETURN_WAIT_S)
            self._returns.set()  # it waits once per save
        self._thread = threading.current_thread()

    def is_of_group(self) -> bool:
        """Whether the save that begins now was staged for a group of ranks. Returns True once per save."""
        needs_group, self._needs_group = self._needs_group, False
        return needs_group

    def memory(self) -> memoryview | None:
        """The memory with the copy that is being saved; None: the state that is saved is not a copy of this stager."""
        self.await_copy()
        return self._lease() if self._is_staged and self._lease is not None else None

    def free_flattened(self) -> None:
        """Frees reference cycles of DCP's flattening, so that only the save holds the copy. Call it when the planner has
        the state.
        """
        if self.memory() is not None and flattening_holds_tensors():
            gc.collect(1)  # the cycles are young: this does not visit all objects of the process

    def note_written(self) -> None:
        """Call it when the staged state is no longer read: its write has ended or failed."""
        self._written.set()

    def close(self) -> None:
        """Waits for the previous save, then frees the memory of copies that are no longer used.

        If something still refers to a copy, such as the thread that saved, the memory is freed with the last reference.
        """
        self.wait_for_last()
        drop_idle_segments()

    def wait_for_last(self) -> None:
        """Returns once the save before has ended, or no thread runs it."""
        while not self._is_last_over():
            time.sleep(_POLL_S)

    def _is_last_over(self) -> bool:
        # The saving thread would wait for its own end.
        if self._thread is threading.current_thread():
            return True
        if self._behind is not None:
            return self._behind.is_over()
        # No tensor of the copy is left, so the save has ended.
        if self._lease is None or self._lease() is None:
            return True
        if self._thread is None:
            # No thread has begun the save: DCP may have failed after staging, and then no thread ever will.
            return time.monotonic() > self._staged_at + BEGIN_TIMEOUT_S
        return not self._thread.is_alive()


def _find_group(call: AsyncCall | None) -> str | None:
    """The name of the group in which a thread of this process will save with other ranks. None: no thread will."""
    if call is None or call.in_process or call.no_dist or not dist.is_available() or not dist.is_initialized():
        return None
    group: Any = call.process_group or dist.group.WORLD
    return str(group.group_name)


def await_device() -> None:
    """Returns once this thread's streams have finished: the saving thread has no access to them."""
    # is_initialized: a call of synchronize alone would set CUDA up in a process that never uses it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
