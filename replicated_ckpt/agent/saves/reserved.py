"""Sequences reserved for open saves: a save that opens later gets a larger one, whichever is published first."""

import threading
from collections.abc import Callable

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import Histories, History, merge_histories
from replicated_ckpt.stores.local.store import LocalStore


class ReservedSequences:
    """By open save, the sequences that it may take, until its place is recorded. Safe for concurrent use.

    A coordinator may stop for minutes between the opening and that record. Reservations end with the agent.
    """

    def __init__(self, store: LocalStore, look: Callable[[str], Histories]) -> None:
        """`look`: returns the histories that this node knows in a directory of checkpoints."""
        self._store = store
        self._look = look
        self._lock = threading.Lock()
        self._by_save: dict[str, Histories] = {}

    def reserve(self, save_id: str, scope: str) -> dict[str, History]:
        """Reserves a sequence for a save; returns the known histories, including the reservations of other open saves.

        A reservation ends once its save has a place, or is over. Otherwise each save of one run would leave a gap in the
        numbers of another.
        """
        with self._lock:
            # Before the look: what gets its place meanwhile counts twice, not never.
            placed = self._store.read_places()
            due = [one for one in self._by_save if one not in placed and self._store.has_intent(one)]
            others = {one: self._by_save[one] for one in due if one != save_id}
            told = merge_histories([self._look(scope), *others.values()])
            next_ones = {one: History(min(told[one].sequence + 1, SEQUENCE_FLOOR_MAX)) for one in told}
            self._by_save = {**others, save_id: next_ones}
        return told

    def release(self, save_id: str) -> None:
        """The save was aborted, and takes none."""
        with self._lock:
            self._by_save.pop(save_id, None)
