"""Measures time on a shared machine, without the moments in which nothing ran."""

import threading
import time
from typing import Self

_LAP_S = 0.05
_LATE_S = 0.2


class Stopwatch:
    """A clock that stands still while this machine, or this process, does. It runs from its creation until `stop`.

    A thread counts laps of 0.05 s. Of a lap, at most 0.2 s count. It is for promises about longest waits: work that
    holds the interpreter for longer is a standstill, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._lap_began, self._counted_s = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> float:
        """Stops the clock. Returns its seconds, like `now`."""
        seconds = self.now()
        self._over.set()
        self._thread.join()
        return seconds

    def now(self) -> float:
        """Seconds since the start, without those in which nothing ran."""
        with self._lock:
            return self._counted_s + min(time.monotonic() - self._lap_began, _LATE_S)

    def _count(self) -> None:
        while not self._over.wait(_LAP_S):
            with self._lock:
                now = time.monotonic()
                self._counted_s += min(now - self._lap_began, _LATE_S)
                self._lap_began = now
