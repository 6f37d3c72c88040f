"""Pace: background work takes so many bytes a second and no more."""

import threading
import time


class Stopped(Exception):
    """The agent is leaving: whoever is at background work lets go of it."""


class Pace:
    """A rate in bytes per second, kept by whoever calls `take` before each piece. For one thread at a time.

    Idle time is not saved up, except for one burst of BURST_S.
    """

    BURST_S = 0.25

    def __init__(self, bytes_per_s: float, stopping: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopping = stopping
        self._due = time.monotonic()

    def take(self, size_bytes: int) -> None:
        """Waits until `size_bytes` more are allowed.

        Raises:
            Stopped: the agent is told to stop meanwhile.
        """
        now = time.monotonic()
        self._due = max(self._due, now - self.BURST_S) + size_bytes / self._bytes_per_s
        if self._stopping.wait(max(0.0, self._due - now)):
            raise Stopped
