"""Waits on the blackboard: how often a rank looks, how long it waits, and the result if the store does not answer."""

import contextlib
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist

from replicated_ckpt.errors import RendezvousFailed

LOOK_AFTER_S = 1.5
"""For so long a wait reads only what it waits for. From then on it also looks for failed ranks, one by one."""
LOOK_EVERY_S = 1.0
SAY_AFTER_S = 30.0
"""After so long a wait logs, once, the ranks that it waits for."""
LINGER_S = 5.0
"""How long the coordinator of a load waits for the other ranks once one has failed."""
_STORE_HINT = (
    "Rank 0 serves it or, under torchrun, torchrun's agent on the rendezvous host. Find what has ended or is "
    "stopped there; then start the job again."
)
POLL_S = 0.005


@contextlib.contextmanager
def reaching_store() -> Iterator[None]:
    """Translates the block's errors of the c10d store: the process that serves it may have ended."""
    try:
        yield
    except dist.DistError as exc:
        raise RendezvousFailed(f"The c10d store of this job does not answer: {exc}", _STORE_HINT) from exc


_unanswered: "weakref.WeakKeyDictionary[dist.Store, tuple[Future[Any], float]]" = weakref.WeakKeyDictionary()
"""The last call that got no answer yet, and until when any thread waits for it."""


class AnsweringStore:
    """The c10d store of a job, under a prefix. A call raises if it gets no answer within the store's own time-out.

    torch's own store waits forever if the process that serves it is stopped, or its host has no power. A call first
    waits for the answer to an earlier call that was interrupted. After a call without an answer, each later one raises
    at once.
    """

    def __init__(self, prefix: str, store: "dist.Store") -> None:
        self._job: Any = store  # its stub has no time-out
        self._store = dist.PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._store, name))

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        # The store's client holds a mutex during a call: a second one would wait for ever behind one that hangs.
        before = _unanswered.get(self._job)
        if before is not None:
            self._await(*before)
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(call(*arguments))
            except RuntimeError as exc:  # the store's; raised where it was asked
                answer.set_exception(exc)

        try:
            start_new_thread(ask, ())  # a Thread takes three times as long to begin
        except RuntimeError:  # the system gives none
            ask()
        self._await(answer, time.monotonic() + self._job.timeout.total_seconds())
        return answer.result()

    def _await(self, answer: Future[Any], until: float) -> None:
        try:
            answer.exception(max(0.0, until - time.monotonic()))
        except TimeoutError:
            limit_s = self._job.timeout.total_seconds()
            raise dist.DistStoreError(f"no answer within its time-out of {limit_s:.0f} s") from None
        finally:
            # Also after Ctrl-C: the call goes on in its thread, and the next one must not overtake it.
            if not answer.done():
                _unanswered[self._job] = answer, until


class Wait:
    """One wait for other ranks. Its pauses grow, and from time to time it checks whether ranks have ended.

    `is_noted`: the other ranks see that this one waits. `is_said`: the log names the ranks that are waited for.
    """

    def __init__(self, deadline_s: float, pause_max_s: float) -> None:
        # Monotonic: a clock that is set must neither end nor prolong a wait.
        self._began = time.monotonic()
        self._until = self._began + deadline_s
        self._next_look = self._began + LOOK_AFTER_S
        self._pause_s, self._pause_max_s = POLL_S, pause_max_s
        self.is_noted = self.is_said = False

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until

    @property
    def is_long(self) -> bool:
        """Whether a coordinator that had seen a rank fail at the beginning would have decided without the others."""
        return self.waited_s > LOOK_AFTER_S + LOOK_EVERY_S + LINGER_S

    def is_look_due(self) -> bool:
        is_due = time.monotonic() > self._next_look
        if is_due:
            self._next_look = time.monotonic() + LOOK_EVERY_S
        return is_due

    def end_within(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._pause_max_s)
