"""What is staged here and may be over: leftovers; and doubts, of which this node cannot know yet how they ended."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.stores.local.directories.intent import Intent


@dataclass(frozen=True)
class Leftover:
    """A save that is staged here and over: to be completed if it was decided anywhere, else removed.

    One that `may_live` is left as it is where it was not decided.
    """

    intent: Intent
    why: str
    may_live: bool = False
    is_over: bool = False
    """Another save has shown that it is: it has overtaken it, or is of the same process group."""
    is_left: bool = False
    """Its own coordinator has gone on to another save: whatever locks its ranks have left, it decides this one no more."""


@dataclass(frozen=True)
class Doubt:
    """A staged save that is neither completed nor removed before one of the nodes that it waits for answers."""

    intent: Intent
    waits_for: tuple[str, ...]
    since: float

    def to_json(self) -> dict[str, Any]:
        return {
            "save_id": self.intent.save_id,
            "checkpoint_id": self.intent.checkpoint_id,
            "waits_for": list(self.waits_for),
            "since_unix_s": self.since,
        }


class Doubts:
    """The saves in doubt as the last try to settle each of them found it. Safe for concurrent use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_save: dict[str, Doubt] = {}
        self._failure_by_save: dict[str, tuple[Intent, str]] = {}

    def note(self, intent: Intent, waits_for: Sequence[str]) -> bool:
        """Keeps that a save is in doubt; whether that, or the nodes waited for, is news."""
        with self._lock:
            known = self._by_save.get(intent.save_id)
            since = time.time() if known is None else known.since
            self._by_save[intent.save_id] = Doubt(intent, tuple(waits_for), since)
            return known is None or known.waits_for != tuple(waits_for)

    def note_failure(self, intent: Intent, why: str) -> bool:
        """Keeps why the last try to settle a save failed; whether that is news."""
        with self._lock:
            known = self._failure_by_save.get(intent.save_id)
            self._failure_by_save[intent.save_id] = (intent, why)
            return known is None or known[1] != why

    def settle(self, save_id: str) -> None:
        """The save is not in doubt, or not any more."""
        with self._lock:
            self._by_save.pop(save_id, None)
            self._failure_by_save.pop(save_id, None)

    def has(self, save_id: str) -> bool:
        """Whether the last try to settle a save left it staged, other than because ranks or agents work on it."""
        with self._lock:
            return save_id in self._by_save or save_id in self._failure_by_save

    def list_left(self) -> Sequence[Intent]:
        """The saves of which `has` is true."""
        with self._lock:
            failed = {save_id: intent for save_id, (intent, _) in self._failure_by_save.items()}
            return list((failed | {save_id: doubt.intent for save_id, doubt in self._by_save.items()}).values())

    def read_all(self) -> tuple[Doubt, ...]:
        """Those in doubt, the oldest first."""
        with self._lock:
            return tuple(sorted(self._by_save.values(), key=lambda doubt: doubt.since))
