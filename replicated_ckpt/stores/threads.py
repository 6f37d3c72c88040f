"""Threads of ranks and agents: how they start, their niceness, errors that pass between them, and parallel calls."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from traceback import clear_frames
from typing import Any, Generic, TypeVar

from replicated_ckpt.errors import ReplicatedCkptError, StoreError, StoreUnavailable
from replicated_ckpt.stores.files.durable import store_error_of
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

FEWER = (
    "Raise the limit of processes and threads (`ulimit -u`, pids.max of the container), or end programs that use many."
)
_ENDING = "interpreter shutdown"
"""Text in the error of an interpreter that exits. Up to Python 3.12.2 such an interpreter starts no thread while it waits
for running ones; 3.12.3 does. Source: github.com/python/cpython/issues/113964."""
_SOONER = (
    "Python was about to exit: wait for the save first (`future.result()`, `writer.wait()`), or use Python 3.12.3."
)


def start_worker(work: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
    """Runs `work` in a thread that does not keep the process alive; returns the thread.

    Raises:
        StoreUnavailable: the system cannot start a thread; `work` was not called.
    """
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    start_thread(thread)
    return thread


def start_thread(thread: threading.Thread) -> None:
    """Starts the thread. While the interpreter exits, an error is also logged, since the program may never read it.

    Raises:
        StoreUnavailable: the system cannot start the thread.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:  # at the limit of threads, or of memory
        is_ending = _ENDING in str(exc)
        hint = _SOONER if is_ending else FEWER
        error = StoreUnavailable("this process", "start", thread.name, f"it cannot start a thread: {exc}", hint)
        if is_ending:
            log.warning("a save or load failed, interrupted by the end of Python: %s", one_line(error))
        raise error from exc


AUTOGROUP = Path("/proc/self/autogroup")
_OF_A_THREAD, _LOWEST = 5, 19
"""Increase of a thread's niceness over its agent's, and the highest niceness. Without autogroups, an agent's threads at
niceness 10 take a third of two busy cores (docs/measurements.md)."""
_TRIES, _TRY_AGAIN_S = 100, 0.11
"""The kernel accepts one change in a tenth of a second from all unprivileged processes together."""


def lower_priority(niceness: int) -> None:
    """Raises the niceness of this thread, and of threads that it starts, for the rest of their lives.

    `niceness`: 1 to 19, of the agent. A thread gets 5 more, because without autogroups each thread competes by itself.
    0, or a value below the current niceness, does nothing. Only for threads that end with their work: an unprivileged
    thread cannot lower its niceness again. On Linux `setpriority` applies to a thread (setpriority(2), "C
    library/kernel differences").
    """
    thread = threading.get_native_id()
    wanted = min(niceness + _OF_A_THREAD, _LOWEST)
    if niceness and wanted > os.getpriority(os.PRIO_PROCESS, thread):
        os.setpriority(os.PRIO_PROCESS, thread, wanted)


def lower_session_priority(niceness: int) -> None:
    """Raises the niceness of this process's autogroup for good, in a background thread, if the process leads its session.

    With autogroups the kernel shares processors between sessions (sched(7), "The autogroup feature"). The niceness of a
    thread then counts only inside its session, and an agent would get as much time as a rank. Without autogroups this does
    nothing. `niceness`: as in `lower_priority`.
    """
    if niceness and os.getsid(0) == os.getpid():
        start_worker(_raise_autogroup, niceness, name="rckpt-priority")


def _raise_autogroup(niceness: int) -> None:
    refusal: OSError | None = None
    for _ in range(_TRIES):
        try:
            words = AUTOGROUP.read_text().split()  # "/autogroup-7 nice 0", or none
            if words and int(words[-1]) < niceness:
                AUTOGROUP.write_text(str(niceness))
        except FileNotFoundError:  # this kernel does not group by session
            return
        except OSError as exc:
            refusal = exc
            if not isinstance(exc, BlockingIOError):
                break
            time.sleep(_TRY_AGAIN_S)
        else:
            return
    log.warning("this agent's session keeps its full CPU share despite --nice: %s", refusal)


def translate_any(error: BaseException, store: str, op: str, key: str) -> ReplicatedCkptError:
    """The error as one of this package's classes. Any other error, such as MemoryError, would break the connection."""
    if isinstance(error, ReplicatedCkptError):
        return error
    if isinstance(error, OSError):
        return store_error_of(error, store, op, key)
    return StoreError(store, op, key, one_line(f"{type(error).__name__}: {error}".removesuffix(": ")))


def forget_locals(error: BaseException) -> BaseException:
    """Releases the local variables in an error's traceback, so that the error can be stored; returns the error."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:  # causes may form a circle
            seen.add(id(each))
            # The frames refer to buffers: 16 MiB for each stored error of a shard.
            clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]
    return error


PARALLEL_MAX = 128
"""Large enough that 50 hanging nodes of 1,000 cost one time-out, not two in a row."""
Key = TypeVar("Key")
Result = TypeVar("Result")


class FanOut(Generic[Key, Result]):
    """One call for many keys, in parallel.

    Outcomes by key: `results` of calls that returned, `errors` of calls that raised one of our errors.
    """

    def __init__(self, *, until_error: bool = False) -> None:
        self._until_error = until_error
        self.results: dict[Key, Result] = {}
        self.errors: dict[Key, ReplicatedCkptError] = {}
        self._bug: BaseException | None = None

    @classmethod
    def run(
        cls, keys: Iterable[Key], call: Callable[[Key], Result], *, most: int = PARALLEL_MAX, until_error: bool = False
    ) -> "FanOut[Key, Result]":
        """Calls `call(key)` for every key, on at most `most` threads; returns when all calls have ended.

        `until_error`: no call begins after another one has raised.

        It uses plain threads: a thread pool refuses new work while the interpreter exits, and a save may still run then.
        """
        outcome = cls(until_error=until_error)
        waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
        for key in keys:
            waiting.put(key)
        count = min(most, waiting.qsize())
        threads = outcome._start_threads(count - 1, waiting, call)
        # This thread makes calls, too. It makes all of them if the system can start no thread.
        outcome._work(waiting, call)
        for thread in threads:
            thread.join()
        # After all threads have ended: a raised bug must not leave calls running.
        if outcome._bug is not None:
            raise outcome._bug
        return outcome

    def _start_threads(
        self, count: int, waiting: "queue.SimpleQueue[Key]", call: Callable[[Key], Result]
    ) -> list[threading.Thread]:
        """Starts as many threads as the system allows. The calling thread makes the remaining calls."""
        threads: list[threading.Thread] = []
        for _ in range(count):
            thread = threading.Thread(target=self._work, args=(waiting, call), daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as exc:
                log.warning("only %d of %d threads could be started: %s", len(threads), count, exc)
                break
            threads.append(thread)
        return threads

    def _work(self, waiting: "queue.SimpleQueue[Key]", call: Callable[[Key], Result]) -> None:
        while not (self._until_error and (self.errors or self._bug)):
            try:
                key = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self.results[key] = call(key)
            except ReplicatedCkptError as exc:
                self.errors[key] = exc
            except BaseException as exc:  # noqa: BLE001 - handed to the caller of `run`
                self._bug = exc

    def raise_first(self) -> Mapping[Key, Result]:
        """The results, or the first error."""
        for error in self.errors.values():
            raise error
        return self.results
