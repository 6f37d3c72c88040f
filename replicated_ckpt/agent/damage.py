"""Damage: which files of this node are known to be bad. They stay until a good copy is there to replace them."""

import threading
from collections.abc import Iterable
from dataclasses import replace

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.stores.local import LocalStore

_Signature = tuple[int, int, int]


class DamageBook:
    """Files that failed their checksum when this agent read them; forgotten when they change. Safe to use concurrently."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._signatures: dict[tuple[str, str, str], _Signature | None] = {}

    def mark(self, checkpoint_id: str, save_id: str, name: str) -> None:
        """Notes that the file, as it lies there now, is bad."""
        signature = self._signature(checkpoint_id, name)
        with self._lock:
            self._signatures[checkpoint_id, save_id, name] = signature

    def seen(self, holdings: Iterable[Holding]) -> tuple[Holding, ...]:
        """The holdings, with what is known to be bad marked as such."""
        self._forget_changed()
        return tuple(self._seen(holding) for holding in holdings)

    def _seen(self, holding: Holding) -> Holding:
        with self._lock:
            bad = [
                name
                for checkpoint_id, save_id, name in self._signatures
                if (checkpoint_id, save_id) == (holding.checkpoint_id, holding.save_id)
            ]
        if not bad:
            return holding
        has_metadata = holding.has_metadata and METADATA_NAME not in bad
        return replace(holding, has_metadata=has_metadata, damaged=tuple(n for n in sorted(bad) if n in holding.sizes))

    def _forget_changed(self) -> None:
        with self._lock:
            known = dict(self._signatures)
        changed = [key for key, then in known.items() if self._signature(key[0], key[2]) != then]
        with self._lock:
            for key in changed:
                self._signatures.pop(key, None)

    def _signature(self, checkpoint_id: str, name: str) -> _Signature | None:
        try:
            status = (self._store.final(checkpoint_id) / name).lstat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
