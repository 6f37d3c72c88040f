"""Fan-out: the same call to many peers at once, bounded in number, every outcome kept."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from replicated_ckpt.errors import ReplicatedCkptError

log = logging.getLogger(__name__)

PARALLEL_MAX = 128
"""The 50 of 1,000 nodes that hang then cost one time-out, not two in a row."""
Key = TypeVar("Key")
Result = TypeVar("Result")


class FanOut(Generic[Key, Result]):
    """Outcomes by key: `results` where the call returned, `errors` where it raised one of our errors."""

    def __init__(self, *, until_error: bool = False) -> None:
        self._until_error = until_error
        self.results: dict[Key, Result] = {}
        self.errors: dict[Key, ReplicatedCkptError] = {}
        self._bug: BaseException | None = None

    @classmethod
    def run(
        cls, keys: Iterable[Key], call: Callable[[Key], Result], *, most: int = PARALLEL_MAX, until_error: bool = False
    ) -> "FanOut[Key, Result]":
        """Calls `call(key)` for every key, on at most so many threads; returns when all have ended.

        `until_error`: no call begins once another one has raised.

        Plain threads, as a thread pool refuses new work once the interpreter has begun to exit, where a save may still
        be under way.
        """
        outcome = cls(until_error=until_error)
        waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
        for key in keys:
            waiting.put(key)
        count = min(most, waiting.qsize())
        threads = outcome._start_threads(count - 1, waiting, call)
        outcome._work(waiting, call)
        for thread in threads:
            thread.join()
        if outcome._bug is not None:
            raise outcome._bug
        return outcome

    def _start_threads(
        self, count: int, waiting: "queue.SimpleQueue[Key]", call: Callable[[Key], Result]
    ) -> list[threading.Thread]:
        """As many as the system gives: the calling thread makes the calls that are left, one after the other."""
        threads: list[threading.Thread] = []
        for _ in range(count):
            thread = threading.Thread(target=self._work, args=(waiting, call), daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as exc:
                log.warning("%d of %d threads can be had: %s", len(threads), count, exc)
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
