"""Patience: how long one process waits, in all, for others of its node that give no sign of life."""

import threading
import time
from collections.abc import Mapping

from replicated_ckpt.stores.spool import OtherSpool

PATIENCE_S = 5.0
"""In all, for one load."""
QUIET_S = 1.0
"""A sign of life that is younger is good; a process that is slow or waits for the processor looks no worse."""
_STEP_MAX_S = 0.1
_POLL_S = 0.0005
_POLL_MAX_S = 0.01


class Pause:
    """Waits that grow from half a millisecond to ten."""

    def __init__(self) -> None:
        self._pause_s = _POLL_S

    def __call__(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _POLL_MAX_S)


class Patience:
    """What one process has left of it. Safe for concurrent use: threads that wait at once spend it once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent_s = 0.0
        self._spent_until_s = 0.0

    def spend(self, step_s: float) -> bool:
        """Another step was waited. Whether the patience is over."""
        now = time.monotonic()
        with self._lock:
            self._spent_s += max(0.0, now - max(now - step_s, self._spent_until_s))
            self._spent_until_s = now
            return self._spent_s > PATIENCE_S


class Wait:
    """One wait of one thread. Of a long step, as this process itself was stopped, only a short one counts."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._last_s = time.monotonic()
        self._quiet_s = 0.0

    def lost(self, spools: Mapping[int, OtherSpool]) -> list[int]:
        """Those of the ranks waited for that are not worth it any more: dead, or silent for too long."""
        now = time.monotonic()
        step_s = min(now - self._last_s, _STEP_MAX_S)
        self._last_s = now
        ages = {rank: now - spool.board.pulse_ns / 1e9 for rank, spool in spools.items()}
        quiet = [rank for rank, age in ages.items() if not 0 <= age < QUIET_S]
        if not quiet:
            return []
        self._quiet_s += step_s
        is_spent = self._patience.spend(step_s)
        has_waited = self._quiet_s > QUIET_S  # it may have been stopped with this process, and be about to go on
        return [
            rank for rank in quiet
            if is_spent or (has_waited and ages[rank] > PATIENCE_S) or not spools[rank].is_locked()
        ]  # fmt: skip
