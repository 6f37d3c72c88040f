"""Notes of the saves that are over here: given up by their coordinator's node, or removed by retention."""

import json
from pathlib import Path

from replicated_ckpt.core.layout import AGENT_DIR, save_ids_in
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.plain import read_plain
from replicated_ckpt.stores.files.shortage import raise_shortage

GIVEN_UP = "given-up.json"
GIVEN_UP_MAX = 4096
"""The oldest are forgotten. A node that asks for one of those waits for the other nodes of that save instead."""


class GivenUpNotes:
    """The notes under one root: save ids, the oldest first. What is noted stays true, whatever becomes of the store.

    A store without the note knows nothing of the save. It may have decided it, and been put back to an earlier state since.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def note(self, save_id: str) -> None:
        """Notes durably a save of which nothing is staged here any more. The caller holds the lock of the staging area,
        and has made the agent's directory.

        Raises:
            StoreError: it is not noted.
        """
        with translate_errors(str(self._root), "write", f"{AGENT_DIR}/{GIVEN_UP}"):
            noted = self._read()
            if save_id not in noted:
                self._write([*noted, save_id][-GIVEN_UP_MAX:])

    def has(self, save_id: str) -> bool:
        """Raises StoreError: no file can be read now, for want of descriptors or memory."""
        return save_id in self.read_all()

    def read_all(self) -> list[str]:
        """Raises StoreError: as `has` does."""
        with translate_errors(str(self._root), "read", f"{AGENT_DIR}/{GIVEN_UP}"):
            return self._read()

    def _write(self, noted: list[str]) -> None:
        write_file(self._root / AGENT_DIR / GIVEN_UP, json.dumps(noted).encode())

    def _read(self) -> list[str]:
        """A file that cannot be believed counts as none: that only has nodes wait for more answers."""
        path = self._root / AGENT_DIR / GIVEN_UP
        try:
            return save_ids_in(json.loads(read_plain(path)))[-GIVEN_UP_MAX:]
        except OSError as exc:
            raise_shortage(exc, path)
        except (ValueError, RecursionError):
            pass
        return []
