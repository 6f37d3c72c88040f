"""The largest sequence of each lineage that this node has heard of, kept across restarts: what it saves next is newer."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.state.note_file import NoteFile
from replicated_ckpt.core.layout import is_lineage
from replicated_ckpt.errors import StoreError

log = logging.getLogger(__name__)

_NAME = "sequence_floor.json"
_LINEAGES_MAX = 256


class SequenceFloor:
    """Only grow. Safe to use concurrently. An unreadable file counts as none: peers will say it again."""

    def __init__(self, directory: Path) -> None:
        self._file = NoteFile(directory / _NAME)
        self._lock = threading.Lock()
        self._by_lineage = self._file.read(_parse) or {}

    def read_all(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._by_lineage)

    def raise_to(self, sequences: Mapping[str, int]) -> None:
        """Keeps the sequences of checkpoints that are committed somewhere, where they are larger than any before.

        What the disk does not take holds until this agent ends, and the next call writes it. That is logged and no error:
        a full disk would keep the agent from removing what fills it.
        """
        with self._lock:
            later = {name: found for name, found in sequences.items() if found > self._by_lineage.get(name, 0)}
            for name, found in later.items():
                self._by_lineage.pop(name, None)
                self._by_lineage[name] = found
            while len(self._by_lineage) > _LINEAGES_MAX:
                del self._by_lineage[next(iter(self._by_lineage))]
            if self._by_lineage:
                self._write()

    def _write(self) -> None:
        """With the lock held."""
        try:
            self._file.write({"sequences": self._by_lineage})
        except StoreError as exc:
            log.warning("how far each run has come is known until this agent ends: %s", exc)


def _parse(document: Any) -> dict[str, int]:
    return {str(lineage): int(found) for lineage, found in document["sequences"].items() if is_lineage(lineage)}
