"""Staged adoptions that this agent keeps from being taken for abandoned, while the command waits for other nodes."""

import os
import threading
import time
from collections.abc import Callable

HELD_S = 3600.0
"""The largest shards take minutes; a command that was killed is over after this, or with the next start of the agent."""


class AdoptionLocks:
    """Descriptors that carry the lock of a staged save. Safe for concurrent use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, float]] = {}

    def hold(self, save_id: str, fd: int) -> None:
        """Takes over `fd`, until the save is released or HELD_S have passed."""
        self.release(save_id)
        with self._lock:
            self._held[save_id] = fd, self._clock() + HELD_S

    def release(self, save_id: str) -> None:
        with self._lock:
            held = self._held.pop(save_id, None)
        if held is not None:
            os.close(held[0])

    def release_old(self) -> None:
        with self._lock:
            old = [save_id for save_id, (_, until) in self._held.items() if self._clock() > until]
        for save_id in old:
            self.release(save_id)
