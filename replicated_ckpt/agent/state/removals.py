"""Saves that this node's own user has removed by hand: what is still to go here, and what no node brings back."""

import contextlib
import threading
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.state.note_file import NoteFile
from replicated_ckpt.core.layout import save_ids_in
from replicated_ckpt.errors import StoreError

NAME = "removed.json"
REMOVALS_MAX = 1024
"""The oldest are forgotten; by then no node holds them, or its user wants to keep them."""


class RemovalBook:
    """Save ids, the oldest first. Safe for concurrent use. A file that cannot be read counts as none.

    A removal is pending until it is done here. Afterwards it is only told to the other nodes: what lies here again then was
    put back by the user.
    """

    def __init__(self, directory: Path) -> None:
        self._file = NoteFile(directory / NAME)
        self._lock = threading.Lock()
        self._told, self._pending = self._file.read(_parse) or ([], [])
        self._is_unsure = False

    def read_all(self) -> frozenset[str]:
        """All that other nodes are told of, done here or not."""
        with self._lock:
            return frozenset(self._told)

    def read_pending_and_done(self) -> tuple[frozenset[str], frozenset[str]]:
        """Those still to be removed, and those that are done, of one moment: one noted meanwhile is in neither.

        What could not be written is written anew first: it may be there, and the next agent would remove what was kept.
        """
        with self._lock:
            if self._is_unsure:
                with contextlib.suppress(StoreError):
                    self._keep(self._told, self._pending)
            return frozenset(self._pending), frozenset(self._told) - frozenset(self._pending)

    def take(self, save_id: str) -> None:
        """Notes a removal, durably. Raises StoreError: it cannot be written, and is not noted."""
        with self._lock:
            self._write(_with(self._told, save_id), _with(self._pending, save_id))

    def finish(self, save_id: str) -> None:
        """Nothing of it lies here any more: from now on it is only told. Raises StoreError: it is pending still."""
        with self._lock:
            self._write(self._told, [noted for noted in self._pending if noted != save_id])

    def forget(self, save_id: str) -> None:
        """The user has put it back: nothing is said of it any more. Raises StoreError: it is noted still."""
        with self._lock:
            if save_id not in self._pending:
                self._write([noted for noted in self._told if noted != save_id], self._pending)

    def _write(self, told: list[str], pending: list[str]) -> None:
        if (told, pending) != (self._told, self._pending):
            self._keep(told, pending)

    def _keep(self, told: list[str], pending: list[str]) -> None:
        self._is_unsure = True
        self._file.write({"told": told, "pending": pending})
        self._told, self._pending, self._is_unsure = told, pending, False


def _with(noted: list[str], save_id: str) -> list[str]:
    return noted if save_id in noted else [*noted, save_id][-REMOVALS_MAX:]


def _parse(document: Any) -> tuple[list[str], list[str]]:
    if isinstance(document, list):  # before 0.1.0 all was in one list
        return save_ids_in(document), []
    return save_ids_in(document.get("told")), save_ids_in(document.get("pending"))
