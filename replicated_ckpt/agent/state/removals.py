"""Saves that this node's own user has removed by hand, kept so that no other node brings them back here."""

import json
import threading
from pathlib import Path

from replicated_ckpt.core.layout import is_save_id
from replicated_ckpt.stores.files.durable import translate_errors, write_file

NAME = "removed.json"
REMOVALS_MAX = 1024
"""The oldest are forgotten; by then no node holds them, or its user wants to keep them."""


class RemovalBook:
    """Save ids, the oldest first. Safe for concurrent use. A file that cannot be read counts as none."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._lock = threading.Lock()
        self._save_ids = self._read()

    def read_all(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._save_ids)

    def take(self, save_id: str) -> None:
        """Notes a removal, durably. Raises StoreError: it cannot be written, and is not noted."""
        with self._lock:
            if save_id in self._save_ids:
                return
            noted = [*self._save_ids, save_id][-REMOVALS_MAX:]
            with translate_errors(str(self._path.parent), "write", NAME):
                write_file(self._path, json.dumps(noted).encode())
            self._save_ids = noted

    def _read(self) -> list[str]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return []
        return [text for text in map(str, found) if is_save_id(text)] if isinstance(found, list) else []
