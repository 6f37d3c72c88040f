"""Pins: checkpoints that a load was told to read, and that retention leaves alone meanwhile."""

import threading
import time
from collections.abc import Callable

PIN_S = 300.0
"""How long after a load began, or the last of its reads here, its checkpoint stays whatever the policy says."""
_PINS_MAX = 1024


class Pins:
    """By reader, the save that it was told to read, and until when that is kept.

    A reader reads one save at a time: the next one ends its pin on the last. Safe for concurrent use; forgotten when the
    agent ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_reader: dict[str, tuple[str, float]] = {}

    def pin(self, save_id: str, reader: str) -> None:
        with self._lock:
            self._by_reader.pop(reader, None)
            self._by_reader[reader] = save_id, self._clock() + PIN_S
            while len(self._by_reader) > _PINS_MAX:
                del self._by_reader[next(iter(self._by_reader))]

    def renew(self, save_id: str) -> None:
        """Keeps a save that is pinned for as long again: it is being read."""
        with self._lock:
            until = self._clock() + PIN_S
            self._by_reader |= dict.fromkeys(self._readers_of(save_id), (save_id, until))

    def is_pinned(self, save_id: str) -> bool:
        with self._lock:
            return bool(self._readers_of(save_id))

    def _readers_of(self, save_id: str) -> list[str]:
        now = self._clock()
        return [reader for reader, (pinned, until) in self._by_reader.items() if pinned == save_id and until > now]
