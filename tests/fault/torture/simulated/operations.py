"""Operations of a simulation: several may be open, one runs at a time, and each pauses where the schedule demands.

Examples are a save with a slow planner, a commit with a slow fsync, and a save in the background: each pauses at a
failpoint while others continue. Each operation has its own thread. They hand a baton to each other, so that a seed
replays exactly.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.files.locks import DescriptorLock

if TYPE_CHECKING:
    from tests.fault.torture.simulated.network import Actor

HUNG_AFTER_S = 60.0
"""Seconds of real time. A simulated operation takes milliseconds."""
_THREAD = "torture-"


class Hung(AssertionError):
    """An operation waits for something that no other operation can release."""


def _taken_lock() -> threading.Lock:
    """A baton that another thread holds: a lock that is released to pass it on. (A semaphore is Python code, and much
    slower.)
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class Operation:
    """One open operation. `actors`: its simulated processes, each called by the one before. The last one runs.

    `is_thread`: a thread of a simulated process. It waits wherever it must, and continues there when it is resumed.
    `rank`: the running rank's view of its world, which the code that drives jobs owns. `result` and `error` are set at
    the end. `waits`: it was resumed, but needs something that an operation below it in the chain of resumptions holds.
    """

    name: str
    actors: "list[Actor]" = field(default_factory=list)
    rank: Any = None
    pauses_at: Callable[[str, "Actor"], bool] | None = None
    result: Any = None
    error: BaseException | None = None
    is_over: bool = False
    paused_at: str = ""
    is_thread: bool = False
    waits: bool = False
    baton: threading.Lock = field(default_factory=_taken_lock)
    resumed_by: "Operation | None" = None


class Operations:
    """All operations of one simulation. The running one holds the baton."""

    def __init__(self, nobody: "Actor") -> None:
        self.running = Operation("the schedule", [nobody])
        self.paused: list[Operation] = []

    def start(
        self, name: str, work: Callable[[], Any], pauses_at: Callable[[str, "Actor"], bool], *, is_thread: bool = False
    ) -> Operation:
        """Runs `work` until it pauses or ends."""
        operation = Operation(name, [self.running.actors[0]], pauses_at=pauses_at, is_thread=is_thread)

        def run() -> None:
            operation.baton.acquire()
            try:
                operation.result = work()
            except BaseException as exc:  # noqa: BLE001 - the waiting schedule gets the error
                operation.error = exc
            operation.is_over = True
            self._give_back(operation)

        threading.Thread(target=run, name=f"{_THREAD}{name}", daemon=True).start()
        self._run(operation)
        return operation

    def reach(self, point: str) -> None:
        """Called by the running operation at a failpoint. If it must pause here, it waits until another operation
        resumes it.
        """
        operation = self.running
        if operation.pauses_at is None or not operation.pauses_at(point, operation.actors[-1]):
            return
        operation.pauses_at, operation.paused_at = None, point
        self.paused.append(operation)
        self._give_back(operation)
        operation.baton.acquire()

    def resume(self, operation: Operation) -> None:
        """Runs a paused operation until it ends, pauses again, or waits for one of the operations that have resumed it."""
        self.paused.remove(operation)
        operation.waits = False
        self._run(operation)

    def _run(self, operation: Operation) -> None:
        operation.resumed_by, self.running = self.running, operation
        operation.baton.release()
        if not operation.resumed_by.baton.acquire(timeout=HUNG_AFTER_S):
            raise Hung(f"{operation.name} hangs")

    def _give_back(self, operation: Operation) -> None:
        assert operation.resumed_by is not None
        self.running = operation.resumed_by
        self.running.baton.release()

    # Waiting for each other --------------------------------------------------------------------------------------

    def wait_until(self, is_free: Callable[[], bool], what: str) -> None:
        """The running operation waits for something that a paused one holds. That one is resumed.

        If no paused one holds it, one of those that resumed this operation holds it, and continues first.
        """
        while not is_free():
            ready = [operation for operation in self.paused if not operation.waits]
            if ready:
                self.resume(ready[-1])
            elif self._has_one_ended():
                continue
            elif self.running.resumed_by is None:
                raise Hung(f"{self.running.name} waits for {what}, which nobody will give back")
            else:
                self.running.waits = True
                self.paused.append(self.running)
                running = self.running
                self._give_back(running)
                running.baton.acquire()

    def _has_one_ended(self) -> bool:
        """Whether one of the waiting operations got what it waited for, and has ended."""
        waiting = list(self.paused)
        for operation in waiting:
            if operation in self.paused:
                self.resume(operation)
        return any(operation.is_over for operation in waiting)

    def wait_for_lock(self) -> Callable[..., None]:
        """Replaces `DescriptorLock.wait`. A wait with a time-out ends at once, because a paused operation is slower."""

        def wait(lock: DescriptorLock, path: Path, *, shared: bool = False, within_s: float | None = None) -> None:
            if within_s is None:
                self.wait_until(lambda: lock.try_take(shared=shared), "the lock of a file")
            elif not lock.try_take(shared=shared):
                raise StoreUnavailable(str(path), "lock", "this", f"it is held for longer than {within_s} s")

        return wait


def is_simulated_thread() -> bool:
    """Whether the running thread belongs to an operation, and not to an earlier test."""
    return threading.current_thread().name.startswith(_THREAD)


class SimulatedLock:
    """A lock for which an operation waits as a thread would. Replaces a `threading.Lock` that is held during I/O."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._operations.wait_until(lambda: self._lock.acquire(blocking=False), "a lock of an agent")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
