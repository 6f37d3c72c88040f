"""Staged saves that may have ended: stale ones, and those in doubt, whose outcome other nodes decide."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.stores.local.directories.intent import Intent


@dataclass(frozen=True)
class StaleSave:
    """A save that is staged here, and that no process works on. It is completed if it was decided anywhere, else
    removed.

    `may_live`: its ranks may still work on it, so it stays unless it was decided.
    """

    intent: Intent
    why: str
    may_live: bool = False
    is_over: bool = False
    """A newer save of the same checkpoint or process group has been opened."""
    is_left: bool = False
    """Its coordinator has begun another save, and so never decides this one, even if ranks still hold its lock."""


@dataclass(frozen=True)
class InDoubtSave:
    """A staged save that is neither completed nor removed yet, and that no process works on.

    It waits for answers of the nodes `waits_for`, or for a retry after `failure`.
    """

    intent: Intent
    waits_for: tuple[str, ...]
    since: float
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "save_id": self.intent.save_id,
            "checkpoint_id": self.intent.checkpoint_id,
            "waits_for": list(self.waits_for),
            "since_unix_s": self.since,
            "failure": self.failure,
        }


class InDoubtSaves:
    """The saves in doubt after the last attempt to settle each. Safe for concurrent use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_save: dict[str, InDoubtSave] = {}

    def record_in_doubt(self, intent: Intent, waits_for: Sequence[str] = (), failure: str = "") -> bool:
        """Records a save in doubt; returns whether the save, the nodes that it waits for, or the failure is new."""
        with self._lock:
            known = self._by_save.get(intent.save_id)
            # The first time counts: each try to settle it would else make the doubt look new.
            since = time.time() if known is None else known.since
            found = self._by_save[intent.save_id] = InDoubtSave(intent, tuple(waits_for), since, failure)
            return found != known

    def settle(self, save_id: str) -> None:
        """Records that the save is no longer in doubt."""
        with self._lock:
            self._by_save.pop(save_id, None)

    def has(self, save_id: str) -> bool:
        """Whether the last attempt to settle the save left it staged, although no rank or agent works on it."""
        with self._lock:
            return save_id in self._by_save

    def read_all(self) -> tuple[InDoubtSave, ...]:
        """All saves in doubt, the oldest first."""
        with self._lock:
            return tuple(sorted(self._by_save.values(), key=lambda save: save.since))
