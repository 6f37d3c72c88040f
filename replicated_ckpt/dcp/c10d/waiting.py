"""Waiting on the blackboard: how often it is looked at, how long, and what if the c10d store does not answer."""

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from replicated_ckpt.errors import MeetingFailed

LOOK_AFTER_S = 1.5
"""So long a wait asks for nothing but what it waits for: then also for ranks that have failed, one by one."""
LOOK_EVERY_S = 1.0
LINGER_S = 5.0
"""How long the coordinator of a load waits for the other ranks once one has failed."""
ENDED_HINT = (
    "Look at the log of that rank; then start the job again, or the ranks that are left as a world of their own."
)
_STORE_HINT = (
    "Rank 0 serves it or, under torchrun, the agent of torchrun on the rendezvous host: look there what has ended; then "
    "start the job again."
)
POLL_S = 0.005


@contextlib.contextmanager
def reaching_store() -> Iterator[None]:
    """Names the error of the block: the c10d store lies in a process that may have ended."""
    try:
        yield
    except dist.DistError as exc:
        raise MeetingFailed(f"The c10d store of this job does not answer: {exc}", _STORE_HINT) from exc


class Wait:
    """One wait on the blackboard: its pauses grow, and from time to time the ranks are looked for that have ended."""

    def __init__(self, deadline_s: float, pause_max_s: float) -> None:
        self._began = time.monotonic()
        self._until = self._began + deadline_s
        self._next_look = self._began + LOOK_AFTER_S
        self._pause_s, self._pause_max_s = POLL_S, pause_max_s

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
