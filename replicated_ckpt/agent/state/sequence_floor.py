"""The largest sequence of each lineage that peers have reported, kept across restarts: the next save is newer."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.state.state_file import StateFile
from replicated_ckpt.core.layout import is_lineage
from replicated_ckpt.core.lineage import believe
from replicated_ckpt.errors import StoreError

log = logging.getLogger(__name__)

_NAME = "sequence_floor.json"
LINEAGES_MAX = 1024
"""For one sender, of lineages without a save here. A further one is refused, so made-up ones push out no real one."""


class SequenceFloor:
    """The values only grow. Safe to use concurrently. A damaged file counts as empty: peers report again."""

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
                    of_sender[sender] += name not in here  # one that lies here is real, and counts against no bound
                known = self._by_lineage.get(name, 0)
                self._by_lineage[name] = max(known, believe(found, here.get(name, 0)))
            if self._by_lineage:
                self._write()

    def _log_full(self, sender: str) -> None:
        """With the lock held."""
        if not self._is_full_logged:
            self._is_full_logged = True
            log.warning("%s has more than %d runs without local checkpoints: not kept", sender, LINEAGES_MAX)

    def _write(self) -> None:
        """With the lock held."""
        try:
            self._file.write_state({"sequences": self._by_lineage, "senders": self._sender_by_lineage})
        except StoreError as exc:
            log.warning("the newest save of each run is forgotten when this agent ends: %s", exc)


def _parse(document: Any) -> tuple[dict[str, int], dict[str, str]]:
    sequences = {str(lineage): int(found) for lineage, found in document["sequences"].items() if is_lineage(lineage)}
    return sequences, {lineage: str(document["senders"][lineage]) for lineage in sequences}
