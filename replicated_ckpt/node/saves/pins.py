"""Pins keep versions that a load reads from being removed on this node."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from replicated_ckpt.stores.files.locks import DescriptorLock

PIN_S = 300.0
"""How long a checkpoint stays after a load of it began or last read here, whatever the policy."""
PINS_MAX = 1024
"""Limit for one address. Further pins are refused, so invented readers cannot push out a pin in use."""


@dataclass(frozen=True)
class _Pin:
    save_id: str
    until: float
    sender: str


class Pins:
    """By reader, the save that it reads and the end of its pin; and a lock on each pinned version.

    A reader reads one save at a time: its next pin ends the previous one. Safe for concurrent use. Pins end with the
    agent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_reader: dict[str, _Pin] = {}
        self._lock_by_save: dict[str, DescriptorLock] = {}
        weakref.finalize(self, _release_all, self._lock_by_save)

    def pin(self, save_id: str, reader: str, lock: DescriptorLock | None = None, sender: str = "") -> None:
        """Pins a save for a reader, unless its sender has PINS_MAX other pins.

        `lock`: the lock on the version, which the pin owns from now on; None: the version is not here.
        """
        with self._lock:
            now = self._clock()
            pins = {other: pin for other, pin in self._by_reader.items() if pin.until > now and other != reader}
            # Peers choose the readers' names: one of them must not keep every checkpoint for ever.
            if sum(pin.sender == sender for pin in pins.values()) < PINS_MAX:
                pins[reader] = _Pin(save_id, now + PIN_S, sender)
            self._by_reader = pins
            if lock is not None:
                self._close(save_id)
                self._lock_by_save[save_id] = lock
            self._release()

    def renew(self, save_id: str) -> None:
        """Extends the pins of a save that is being read."""
        with self._lock:
            until = self._clock() + PIN_S
            self._by_reader |= {
                reader: replace(self._by_reader[reader], until=until) for reader in self._readers_of(save_id)
            }

    def end(self, session: str) -> None:
        """Ends the pins of a session: its ranks save now, so their loads have ended."""
        with self._lock:
            for reader in [reader for reader in self._by_reader if reader.startswith(f"{session}/")]:
                del self._by_reader[reader]
            self._release()

    def drop(self, save_id: str) -> None:
        """Ends all pins of a save, on the user's order. A local process that reads the save still has its own lock."""
        with self._lock:
            for reader in self._readers_of(save_id):
                del self._by_reader[reader]
            self._release()

    def release_old(self) -> None:
        """Releases the locks of versions that are no longer pinned."""
        with self._lock:
            self._release()

    def is_pinned(self, save_id: str) -> bool:
        with self._lock:
            return bool(self._readers_of(save_id))

    def has_any(self) -> bool:
        with self._lock:
            now = self._clock()
            return any(pin.until > now for pin in self._by_reader.values())

    def _release(self) -> None:
        for save_id in [save_id for save_id in self._lock_by_save if not self._readers_of(save_id)]:
            self._close(save_id)

    def _close(self, save_id: str) -> None:
        lock = self._lock_by_save.pop(save_id, None)
        if lock is not None:
            lock.release()

    def _readers_of(self, save_id: str) -> list[str]:
        now = self._clock()
        return [reader for reader, pin in self._by_reader.items() if pin.save_id == save_id and pin.until > now]


def _release_all(lock_by_save: dict[str, DescriptorLock]) -> None:
    for lock in lock_by_save.values():
        lock.release()
