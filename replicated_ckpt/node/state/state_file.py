"""A small document that an agent keeps across restarts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import raise_shortage, translate_errors, write_file

Found = TypeVar("Found")
_PROBLEMS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, ConfigInvalid)


class StateFile:
    """JSON at `path`. Not thread-safe: each book that uses one locks around its writes."""

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self._path = path
        self._mode = mode
        self._written = b""

    def read_state(self, parse: Callable[[Any], Found]) -> Found | None:
        """Reads and parses the last agent's document; None if it is missing or damaged.

        Raises:
            StoreError: the system lacks descriptors or memory to read it. It must not count as missing: the next write
                would lose its content.
        """
        try:
            raw = self._path.read_bytes()
        except OSError as exc:
            raise_shortage(exc, self._path)
            return None
        try:
            found = parse(json.loads(raw))
        except _PROBLEMS:
            return None
        self._written = raw
        return found

    def read_checked(self, name: str, parse: Callable[[Any], Found]) -> Found | None:
        """As `read_state`, of a document that `write_checked` wrote; None also if its checksum shows a flipped bit."""

        def parse_checked(document: Any) -> Found:
            told = document[name]
            if _checksum(told) != document["crc32c"]:
                raise ValueError("it is damaged")
            return parse(told)

        return self.read_state(parse_checked)

    def write_checked(self, name: str, told: Any) -> None:
        """As `write_state`, of a document under a name, with its checksum."""
        self.write_state({"crc32c": _checksum(told), name: told})

    def write_state(self, document: Any) -> None:
        """Writes the document durably, unless it is there already. After a failure the file has the old or the new one.

        Raises:
            StoreError: it could not be written; the next call writes again.
        """
        raw = json.dumps(document).encode()
        # Most saves bring nothing new: an fsync each time would slow them down.
        if raw == self._written:
            return
        # A failed write may leave either content: the next call must write again.
        self._written = b""
        with translate_errors(str(self._path.parent), "write", self._path.name):
            write_file(self._path, raw, self._mode)
        self._written = raw


def _checksum(told: Any) -> int:
    return crc32c(json.dumps(told).encode())
