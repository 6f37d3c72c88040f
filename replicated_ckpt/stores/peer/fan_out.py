"""Fan-out: the same call to many peers in parallel, on a bounded number of threads. It collects every outcome."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from replicated_ckpt.errors import ReplicatedCkptError

log = logging.getLogger(__name__)

PARALLEL_MAX = 128
"""Large enough that 50 hanging nodes of 1,000 cost one time-out, not two in a row."""
Key = TypeVar("Key")
Result = TypeVar("Result")


class FanOut(Generic[Key, Result]):
    """Outcomes by key: `results` of calls that returned, `errors` of calls that raised one of our errors."""

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
        # This thread works, too: it is enough if the system has no thread left.
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
