"""Damage: the files of this node that were found to be bad, until a good copy replaces them; and the scrub's progress."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import METADATA_NAME, is_checkpoint_file, is_checkpoint_id, is_save_id
from replicated_ckpt.errors import ManifestVersionUnknown, ObjectMissing, StoreError
from replicated_ckpt.node.state.state_file import StateFile
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

NAME = "damage.json"
_KNOWN_MAX = 4096
_Key = tuple[str, str, str]
_Signature = tuple[int, int, int]
NoteRead = Callable[[Holding], None]


@dataclass(frozen=True)
class _Bad:
    """A bad file. `signature`: identifies the file at that time; None: it was missing."""

    signature: _Signature | None
    has_damaged_footer: bool = False


class DamageBook:
    """Files of this node that failed their checksum. An entry ends when its file changes.

    Kept across restarts, so that known damage stays known. Safe for concurrent use.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._file = StateFile(store.root_agent_directory() / NAME)
        # If the list cannot be read, it starts empty: the scrub finds the damage again.
        self._bad, self.scrubbed_to = self._file.read_state(_parse) or ({}, "")

    def mark(self, checkpoint_id: str, save_id: str, name: str, *, has_damaged_footer: bool = False) -> None:
        """Records that the current file is bad. `has_damaged_footer`: only its footer is; the data is intact."""
        key = checkpoint_id, save_id, name
        found = _Bad(self._signature(key), has_damaged_footer)
        with self._lock:
            self._keep(self._bad | {key: found})

    def clear(self, checkpoint_id: str, save_id: str, name: str) -> None:
        """Records that the file was read and is intact."""
        with self._lock:
            self._keep({key: found for key, found in self._bad.items() if key != (checkpoint_id, save_id, name)})

    def begin_reading(self) -> NoteRead:
        """Begins a full read. The returned function records its result, checkpoint by checkpoint.

        The read may take hours. Damage that is found meanwhile stays known, even if the read saw the file intact before.
        """
        with self._lock:
            known = dict(self._bad)
        return partial(self._note_read, known)

    def _note_read(self, known: Mapping[_Key, _Bad], holding: Holding) -> None:
        names = {METADATA_NAME, *holding.sizes}
        bad = {*holding.damaged, *(() if holding.has_metadata else (METADATA_NAME,))}
        key = holding.checkpoint_id, holding.save_id
        marks = {(*key, name): _Bad(self._signature((*key, name)), name in holding.footer_damaged) for name in bad}
        intact = {(*key, name) for name in names - bad}
        with self._lock:
            self._keep(
                {at: found for at, found in self._bad.items() if at not in intact or known.get(at) is not found} | marks
            )

    def note_scrubbed_to(self, checkpoint_id: str) -> None:
        """Records the scrub's progress: it continues after this checkpoint; "": with the first one."""
        with self._lock:
            self.scrubbed_to = checkpoint_id
            self._write()

    def read_all(self) -> list[tuple[str, str, str]]:
        """The known bad files: checkpoint, save, name. They may have been mended since."""
        with self._lock:
            return list(self._bad)

    def is_known(self, checkpoint_id: str, save_id: str, name: str) -> bool:
        """Whether the current file is known to be bad."""
        self._forget_changed()
        with self._lock:
            return (checkpoint_id, save_id, name) in self._bad

    def has_file(self, status: os.stat_result) -> bool:
        """Whether damage was found in this file, under any of its names. Writes nothing."""
        with self._lock:
            return _signature_of(status) in {found.signature for found in self._bad.values()}

    def mark_damaged(self, holdings: Iterable[Holding]) -> tuple[Holding, ...]:
        """The holdings with known damage marked."""
        self._forget_changed()
        return tuple(self._mark_damaged(holding) for holding in holdings)

    @classmethod
    def mark_recorded(cls, store: LocalStore, holdings: Iterable[Holding]) -> tuple[Holding, ...]:
        """As `mark_damaged`, from the agent's file. It writes nothing, so any process may call it."""
        book = cls(store)
        book._bad = {key: found for key, found in book._bad.items() if not book._is_changed(key, found)}
        return tuple(map(book._mark_damaged, holdings))

    def _mark_damaged(self, holding: Holding) -> Holding:
        with self._lock:
            bad = {
                name: found.has_damaged_footer
                for (checkpoint_id, save_id, name), found in self._bad.items()
                if (checkpoint_id, save_id) == (holding.checkpoint_id, holding.save_id)
            }
        if not bad:
            return holding
        damaged = tuple(name for name in sorted(bad) if name in holding.sizes)
        return replace(
            holding,
            has_metadata=holding.has_metadata and METADATA_NAME not in bad,
            damaged=damaged,
            footer_damaged=tuple(name for name in damaged if bad[name]),
        )

    def _forget_changed(self) -> None:
        with self._lock:
            known = dict(self._bad)
        changed = {key: then for key, then in known.items() if self._is_changed(key, then)}
        with self._lock:  # entries that were marked anew since then stay
            self._keep({key: found for key, found in self._bad.items() if changed.get(key) != found})

    def _keep(self, bad: dict[_Key, _Bad]) -> None:
        """With the lock held."""
        is_known = bad == self._bad
        self._bad = dict(list(bad.items())[-_KNOWN_MAX:])  # even if equal: `_note_read` compares entries by identity
        if not is_known:
            self._write()

    def _write(self) -> None:
        """With the lock held."""
        bad = [[*key, found.signature, found.has_damaged_footer] for key, found in self._bad.items()]
        try:
            self._file.write_state({"bad": bad, "scrubbed_to": self.scrubbed_to})
        except StoreError as exc:
            log.warning(
                "the list of damaged files and the progress of the scrub are lost when this agent ends: %s", exc
            )

    def _is_changed(self, key: _Key, then: _Bad) -> bool:
        """A file that the system refuses to look at now, for example for lack of descriptors, counts as unchanged."""
        try:
            return self._look(key) != then.signature
        except (OSError, StoreError):
            return False

    def _signature(self, key: _Key) -> _Signature | None:
        try:
            return self._look(key)
        except (OSError, StoreError):
            return None

    def _look(self, key: _Key) -> _Signature | None:
        """The file as it lies there now. Raises: OSError, StoreError"""
        try:
            status = self._store.path_of(*key).lstat()
        except (FileNotFoundError, NotADirectoryError, ObjectMissing, ManifestVersionUnknown):
            return None
        return _signature_of(status)


def _signature_of(status: os.stat_result) -> _Signature:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _parse(document: Any) -> tuple[dict[_Key, _Bad], str]:
    return dict(map(_parse_bad, document["bad"])), str(document["scrubbed_to"])


def _parse_bad(entry: Any) -> tuple[_Key, _Bad]:
    checkpoint_id, save_id, name, signature, has_damaged_footer = entry
    if not (is_checkpoint_id(checkpoint_id) and is_save_id(save_id) and is_checkpoint_file(name)):
        raise ValueError(f"not a file of a checkpoint: {entry!r}"[:300])
    at = None if signature is None else (int(signature[0]), int(signature[1]), int(signature[2]))
    return (checkpoint_id, save_id, name), _Bad(at, bool(has_damaged_footer))
