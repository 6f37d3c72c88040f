"""Sequences that open saves may take: a save that opens later gets a larger one, whichever of them is published first."""

import threading
from collections.abc import Mapping

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import History, merge_histories

_SAVES_MAX = 64


class ReservedSequences:
    """What each save that was opened here may take. Safe for concurrent use; forgotten when the agent ends.

    A coordinator may stop for minutes between the opening of its save and the moment at which a node notes its place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_save: dict[str, Mapping[str, History]] = {}

    def reserve(self, save_id: str, known: Mapping[str, History]) -> dict[str, History]:
        """What this node tells a save that opens: what it knows, and what other open saves may take."""
        with self._lock:
            others = [reserved for other, reserved in self._by_save.items() if other != save_id]
            told = merge_histories([known, *others])
            next_ones = {one: History(min(told[one].sequence + 1, SEQUENCE_FLOOR_MAX)) for one in told}
            self._by_save[save_id] = next_ones
            while len(self._by_save) > _SAVES_MAX:
                del self._by_save[next(iter(self._by_save))]
        return told

    def release(self, save_id: str) -> None:
        """The save was given up, and takes none."""
        with self._lock:
            self._by_save.pop(save_id, None)
