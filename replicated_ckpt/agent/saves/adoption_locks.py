"""Staged adoptions that this agent keeps from being taken for abandoned, while the command waits for other nodes."""

import threading
import time
from collections.abc import Callable, Iterable

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.files.locks import HeldLock

ADOPTIONS_MAX = 4
"""Open on one node: each may stage `.metadata`, and a second copy of the shards. The command opens one after the other."""
HELD_S = 30.0
"""After the last word of the command, which speaks every few seconds for as long as it lives, however long nodes stage."""


class AdoptionLocks:
    """The locks of staged saves. Safe for concurrent use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, tuple[HeldLock, float]] = {}
        self._open: set[str] = set()

    def open(self, save_id: str) -> None:
        """Counts an adoption until it is closed.

        Raises:
            StoreUnavailable: as many as there may be are open.
        """
        with self._lock:
            if len(self._open | {save_id}) > ADOPTIONS_MAX:
                detail = f"{ADOPTIONS_MAX} adoptions are open on this node"
                hint = "Adopt when they are over; one whose command was killed is given up within a minute."
                raise StoreUnavailable("this agent", "open", save_id, detail, hint)
            self._open.add(save_id)

    def take_over(self, save_ids: Iterable[str]) -> None:
        """Counts adoptions that an earlier agent has left open, however many."""
        with self._lock:
            self._open.update(save_ids)

    def close(self, save_id: str) -> None:
        """The adoption is over; its lock is released, too. For a save that is no adoption nothing changes."""
        with self._lock:
            self._open.discard(save_id)
        self.release(save_id)

    def hold(self, save_id: str, lock: HeldLock) -> None:
        """Takes over the lock, until the save is released or HELD_S have passed."""
        with self._lock:
            before = self._held.pop(save_id, None)
            self._held[save_id] = lock, self._clock() + HELD_S
        if before is not None:
            before[0].release()

    def keep(self, save_id: str) -> None:
        """The command lives: what is held for it is held for HELD_S from now. Of what is not nothing changes."""
        with self._lock:
            if save_id in self._held:
                self._held[save_id] = self._held[save_id][0], self._clock() + HELD_S

    def release(self, save_id: str) -> None:
        with self._lock:
            held = self._held.pop(save_id, None)
        if held is not None:
            held[0].release()

    def release_old(self) -> None:
        with self._lock:
            over = [save_id for save_id, (_, until) in self._held.items() if self._clock() > until]
            old = [self._held.pop(save_id)[0] for save_id in over]
        for lock in old:
            lock.release()
