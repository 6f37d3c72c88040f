"""Notes of the saves that are over here: given up by their coordinator's node, removed by retention, or saved over."""

import json
from pathlib import Path

from replicated_ckpt.core.layout import AGENT_DIR, STAGING_DIR, save_ids_in
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.files.plain import read_plain
from replicated_ckpt.stores.files.shortage import raise_shortage
from replicated_ckpt.stores.local.directories.catalog import Catalog

GIVEN_UP = "given-up.json"
SAVED_OVER = "saved-over.json"
GIVEN_UP_MAX = 4096
"""The oldest are forgotten. A node that asks for one of those waits for the other nodes of that save instead."""


class GivenUpNotes:
    """The notes under one root: save ids, the oldest first. What is noted stays true, whatever becomes of the store.

    A store without the note knows nothing of the save. It may have decided it, and been put back to an earlier state since.
    """

    def __init__(self, root: Path, name: str = GIVEN_UP) -> None:
        self._root = root
        self._name = name

    def note(self, save_id: str) -> None:
        """Notes durably a save of which nothing is staged here any more. The caller holds the lock of the staging area,
        and has made the agent's directory.

        Raises:
            StoreError: it is not noted.
        """
        with translate_errors(str(self._root), "write", f"{AGENT_DIR}/{self._name}"):
            noted = self._read()
            if save_id not in noted:
                self._write([*noted, save_id][-GIVEN_UP_MAX:])

    def has(self, save_id: str) -> bool:
        """Raises StoreError: no file can be read now, for want of descriptors or memory."""
        return save_id in self.read_all()

    def read_all(self) -> list[str]:
        """Raises StoreError: as `has` does."""
        with translate_errors(str(self._root), "read", f"{AGENT_DIR}/{self._name}"):
            return self._read()

    def _write(self, noted: list[str]) -> None:
        write_file(self._root / AGENT_DIR / self._name, json.dumps(noted).encode())

    def _read(self) -> list[str]:
        """A file that cannot be believed counts as none: that only has nodes wait for more answers."""
        path = self._root / AGENT_DIR / self._name
        try:
            return save_ids_in(json.loads(read_plain(path)))[-GIVEN_UP_MAX:]
        except OSError as exc:
            raise_shortage(exc, path)
        except (ValueError, RecursionError):
            pass
        return []


class SavedOverNotes(GivenUpNotes):
    """The saves that are gone from here, as another run's save, which was seen whole, has taken their name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, SAVED_OVER)
        self._catalog = Catalog(root)

    def read_gone(self) -> frozenset[str]:
        """Those that are not here now. Raises StoreError."""
        noted = frozenset(self.read_all())
        return noted - self._find_here() if noted else noted

    def forget_put_back(self) -> None:
        """Drops the notes of what a user has put back: if it is lost here again, other nodes are to bring it.

        Raises:
            StoreError: they are noted still.
        """
        noted = self.read_all()
        if not noted or not self._find_here().intersection(noted):  # without notes, as a rule, nothing is looked at
            return
        what = translate_errors(str(self._root), "write", f"{AGENT_DIR}/{self._name}")
        with what, exclusive(self._root / STAGING_DIR):
            here = self._find_here()
            self._write([save_id for save_id in self._read() if save_id not in here])

    def _find_here(self) -> frozenset[str]:
        """What goes by another name, as a user has copied it, is another checkpoint."""
        committed = self._catalog.committed()
        return frozenset(found.save_id for name, found in committed if name == found.checkpoint_id)
