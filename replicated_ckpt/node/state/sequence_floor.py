"""Sequences of saves: the largest of each lineage that peers reported, kept across restarts, and reserved ones."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_lineage
from replicated_ckpt.core.lineage import Histories, History, accept_sequence, merge_histories
from replicated_ckpt.errors import StoreError
from replicated_ckpt.node.state.state_file import StateFile
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

_NAME = "sequence_floor.json"
LINEAGES_MAX = 1024
"""Limit for one sender, of lineages that have no save here. Further ones are ignored, and so push out no real ones."""


class SequenceFloor:
    """The largest sequence of each lineage that peers reported. The values only grow. Safe to use concurrently.

    A damaged file counts as empty: peers report again.
    """

    def __init__(self, directory: Path) -> None:
        self._file = StateFile(directory / _NAME)
        self._lock = threading.Lock()
        self._by_lineage, self._sender_by_lineage = self._file.read_state(_parse) or ({}, {})
        self._is_full_logged = False

    def read_all(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._by_lineage)

    def raise_to(self, sequences: Mapping[str, int], here: Mapping[str, int], sender: str) -> None:
        """Stores reported sequences that are larger than the known ones, up to a bound.

        `here`: the largest sequences that are committed or staged on this node. The bound starts from these, not from
        earlier reports: a hostile peer could otherwise raise it step by step.

        If the disk cannot be written, the values hold until this agent ends, and the next call writes them. That is only
        logged: on a full disk an error would keep the agent from removing checkpoints.
        """
        with self._lock:
            later = {name: found for name, found in sequences.items() if found > self._by_lineage.get(name, 0)}
            of_sender = Counter(self._sender_by_lineage[name] for name in self._sender_by_lineage if name not in here)
            for name, found in later.items():
                if name not in self._by_lineage:
                    if name not in here and of_sender[sender] >= LINEAGES_MAX:
                        self._log_full(sender)
                        continue
                    self._sender_by_lineage[name] = sender
                    of_sender[sender] += name not in here  # a lineage with a save here is real, and does not count
                known = self._by_lineage.get(name, 0)
                self._by_lineage[name] = max(known, accept_sequence(found, here.get(name, 0)))
            if self._by_lineage:
                self._write()

    def _log_full(self, sender: str) -> None:
        """With the lock held."""
        if not self._is_full_logged:
            self._is_full_logged = True
            log.warning("%s reports over %d runs without a checkpoint here: others are ignored", sender, LINEAGES_MAX)

    def _write(self) -> None:
        """With the lock held."""
        try:
            self._file.write_state({"sequences": self._by_lineage, "senders": self._sender_by_lineage})
        except StoreError as exc:
            log.warning("the largest sequence of each run is lost when this agent ends: %s", exc)


def _parse(document: Any) -> tuple[dict[str, int], dict[str, str]]:
    sequences = {str(lineage): int(found) for lineage, found in document["sequences"].items() if is_lineage(lineage)}
    return sequences, {lineage: str(document["senders"][lineage]) for lineage in sequences}


class ReservedSequences:
    """By open save, the sequences that it may take, until its place is recorded. Safe for concurrent use.

    A coordinator may stop for minutes between the opening and that record. Reservations end with the agent.
    """

    def __init__(self, store: LocalStore, look: Callable[[str], Histories]) -> None:
        """`look`: returns this node's histories of a directory of checkpoints."""
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
            # Read before the look: a save that gets its place meanwhile counts twice, instead of not at all.
            placed = self._store.read_places()
            due = [one for one in self._by_save if one not in placed and self._store.has_intent(one)]
            others = {one: self._by_save[one] for one in due if one != save_id}
            told = merge_histories([self._look(scope), *others.values()])
            next_ones = {one: History(min(told[one].sequence + 1, SEQUENCE_FLOOR_MAX)) for one in told}
            self._by_save = {**others, save_id: next_ones}
        return told

    def release(self, save_id: str) -> None:
        """Ends the reservation of a save that has ended."""
        with self._lock:
            self._by_save.pop(save_id, None)
