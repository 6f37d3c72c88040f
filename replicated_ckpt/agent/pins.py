"""Pins: checkpoints that a load was told to read, and that retention leaves alone meanwhile."""

import threading
import time
from collections.abc import Callable

PIN_S = 300.0
"""How long after a load began, or the last of its reads here, its checkpoint stays whatever the policy says."""
_PINS_MAX = 1024


class Pins:
    """Saves by id, and until when each is kept. Safe for concurrent use; forgotten when the agent ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def pin(self, save_id: str) -> None:
        with self._lock:
            self._until.pop(save_id, None)
            self._until[save_id] = self._clock() + PIN_S
            while len(self._until) > _PINS_MAX:
                del self._until[next(iter(self._until))]

    def renew(self, save_id: str) -> None:
        """Keeps a save that is pinned for as long again: it is being read."""
        with self._lock:
            if save_id in self._until:
                self._until[save_id] = self._clock() + PIN_S

    def is_pinned(self, save_id: str) -> bool:
        with self._lock:
            return self._until.get(save_id, 0.0) > self._clock()
