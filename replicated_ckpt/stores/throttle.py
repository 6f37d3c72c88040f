"""Pace: limits background work to a number of bytes per second."""

import threading
import time
from collections.abc import Callable

BUSY_BYTES_PER_S = 256 << 20
"""Pace of re-protection's copies while ranks of the node save, or a load has pinned a checkpoint here."""
FETCHING_BYTES_PER_S = 16 << 20
"""Pace of these copies while ranks fetch a checkpoint from other nodes. The job waits for that, and it needs the same link
and processors."""
SUBMITTED_MIB_PER_S_MIN = 8
"""Least pace of submitted shards. Four of them share it, and a buddy's socket times out after seconds without data."""
LOOK_EVERY_S = 0.05


class Stopped(Exception):
    """The agent is stopping: its background threads abort their work."""


class Pace:
    """A rate in bytes per second, shared by all threads that call `take` before each piece.

    Idle time earns no credit beyond one burst of BURST_S.
    """

    BURST_S = 0.25

    def __init__(self, bytes_per_s: float, stopping: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopping = stopping
        self._due = time.monotonic()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Waits until `size_bytes` more are allowed.

        Raises:
            Stopped: the agent was asked to stop meanwhile.
        """
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - self.BURST_S) + size_bytes / self._bytes_per_s
            wait_s = max(0.0, self._due - now)
        # Outside the lock: others only reserve their turn, and a stop ends the wait at once.
        if self._stopping.wait(wait_s):
            raise Stopped


class YieldingPace(Pace):
    """A pace whose rate `ask` returns; None means no limit. `ask` is called again every LOOK_EVERY_S.

    For one thread at a time.
    """

    def __init__(self, stopping: threading.Event, ask: Callable[[], float | None]) -> None:
        super().__init__(BUSY_BYTES_PER_S, stopping)
        self._ask = ask
        self._is_free = True
        self._asked_at = -LOOK_EVERY_S

    def take(self, size_bytes: int) -> None:
        now = time.monotonic()
        if now - self._asked_at >= LOOK_EVERY_S:  # not for each piece: `ask` looks at lock files
            rate, self._asked_at = self._ask(), now
            self._is_free = rate is None
            self._bytes_per_s = rate or self._bytes_per_s
        if not self._is_free:
            super().take(size_bytes)
        elif self._stopping.is_set():
            raise Stopped


def copy_pace(
    mib_per_s: float | None,
    stopping: threading.Event,
    is_busy: Callable[[], bool],
    is_fetching: Callable[[], bool],
) -> Pace:
    """The pace of re-protection's copies: `mib_per_s`. With None there is a limit only while the node is busy."""
    if mib_per_s is not None:
        return Pace(mib_per_s * (1 << 20), stopping)

    def allowed_bytes_per_s() -> float | None:
        if is_fetching():
            return FETCHING_BYTES_PER_S
        return BUSY_BYTES_PER_S if is_busy() else None

    return YieldingPace(stopping, allowed_bytes_per_s)


def submission_pace(mib_per_s: float | None, stopping: threading.Event, copying: Pace) -> Pace | None:
    """The pace of submitted shards: that of copies, but at least SUBMITTED_MIB_PER_S_MIN. None: no limit."""
    if mib_per_s is None:
        return None
    return copying if mib_per_s >= SUBMITTED_MIB_PER_S_MIN else Pace(SUBMITTED_MIB_PER_S_MIN << 20, stopping)
