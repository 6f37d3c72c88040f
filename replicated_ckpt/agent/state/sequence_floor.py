"""The largest sequence of each lineage that this node has heard of, kept across restarts: what it saves next is newer."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from replicated_ckpt.core.layout import is_lineage
from replicated_ckpt.stores.files.durable import translate_errors, write_file

_NAME = "sequence_floor.json"
_LINEAGES_MAX = 256


class SequenceFloor:
    """Only grow. Safe to use concurrently. An unreadable file counts as none: peers will say it again."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME
        self._lock = threading.Lock()
        try:
            told = json.loads(self._path.read_bytes())["sequences"]
            self._by_lineage = {
                str(lineage): int(sequence) for lineage, sequence in told.items() if is_lineage(lineage)
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self._by_lineage = {}

    def read_all(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._by_lineage)

    def raise_to(self, sequences: Mapping[str, int]) -> None:
        """Keeps the sequences of checkpoints that are committed somewhere, where they are larger than any before."""
        with self._lock:
            later = {name: found for name, found in sequences.items() if found > self._by_lineage.get(name, 0)}
            if not later:
                return
            for name, found in later.items():
                self._by_lineage.pop(name, None)
                self._by_lineage[name] = found
            while len(self._by_lineage) > _LINEAGES_MAX:
                del self._by_lineage[next(iter(self._by_lineage))]
            document = json.dumps({"sequences": self._by_lineage}).encode()
            with translate_errors(str(self._path.parent), "write", _NAME):
                write_file(self._path, document)
