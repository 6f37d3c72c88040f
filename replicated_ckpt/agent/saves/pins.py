"""Pins: versions that a load was told to read, which nothing removes from this node meanwhile."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from replicated_ckpt.stores.files.locks import DescriptorLock

PIN_S = 300.0
"""How long after a load began, or the last of its reads here, its checkpoint stays whatever the policy says."""
PINS_MAX = 1024
"""Of one address. One more is not kept: made-up readers push out no pin of a load that is under way."""


@dataclass(frozen=True)
class _Pin:
    save_id: str
    until: float
    sender: str


class Pins:
    """By reader, the save that it was told to read, and until when that is kept; and a lock on each of these versions.

    A reader reads one save at a time: the next one ends its pin on the last. Safe for concurrent use; forgotten when the
    agent ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_reader: dict[str, _Pin] = {}
        self._lock_by_save: dict[str, DescriptorLock] = {}
        weakref.finalize(self, _release_all, self._lock_by_save)

    def pin(self, save_id: str, reader: str, lock: DescriptorLock | None = None, sender: str = "") -> None:
        """Keeps a save for a reader, unless its sender has PINS_MAX others.

        `lock`: that on the version, taken over; None: it does not lie here.
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
        """Keeps a save that is pinned for as long again: it is being read."""
        with self._lock:
            until = self._clock() + PIN_S
            self._by_reader |= {
                reader: replace(self._by_reader[reader], until=until) for reader in self._readers_of(save_id)
            }

    def end(self, session: str) -> None:
        """The ranks of a session save: what they loaded before is read."""
        with self._lock:
            for reader in [reader for reader in self._by_reader if reader.startswith(f"{session}/")]:
                del self._by_reader[reader]
            self._release()

    def drop(self, save_id: str) -> None:
        """Keeps a save for no reader any more, as the user of the node wants; a process that reads it has its own lock."""
        with self._lock:
            for reader in self._readers_of(save_id):
                del self._by_reader[reader]
            self._release()

    def release_old(self) -> None:
        """Gives back the locks of versions that are pinned no more."""
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
