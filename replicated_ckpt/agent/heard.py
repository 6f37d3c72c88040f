"""The largest sequence that this node has heard of, kept across restarts: what it saves next is newer than that."""

import json
import threading
from pathlib import Path

from replicated_ckpt.stores.durable import translated, write_file

_HEARD_NAME = "heard.json"


class HeardSequence:
    """Only grows. Safe to use concurrently. An unreadable file counts as none: peers will say it again."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _HEARD_NAME
        self._lock = threading.Lock()
        try:
            self.largest = int(json.loads(self._path.read_bytes())["sequence"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            self.largest = 0

    def hear(self, sequence: int) -> None:
        """Keeps the sequence of a checkpoint that is committed somewhere, if it is larger than any before."""
        with self._lock:
            if sequence <= self.largest:
                return
            self.largest = sequence
        with translated(str(self._path.parent), "write", _HEARD_NAME):
            write_file(self._path, json.dumps({"sequence": sequence}).encode())
