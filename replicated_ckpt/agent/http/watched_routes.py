"""Routes of a running agent, which count their answers as work: a busy agent does not leave."""

import threading
import time
from typing import Any

from replicated_ckpt.agent.http.routes import Routes, split_target
from replicated_ckpt.agent.requests.request import Answer, Request

OPENING_WITHIN_S = 60.0
"""How long an agent that was told to stop waits for a save that a rank of this node is about to open."""
_WATCHING, _HOLDINGS, _SAVES = {("v1", "status"), ("metrics",)}, ("v1", "holdings"), ("v1", "saves")


class Activity:
    """When the agent last had work, and whether a save is about to be opened. Requests under way count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._last = time.monotonic()
        self._registered_at: float | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._under_way -= 1
            self._last = time.monotonic()

    def touch(self) -> None:
        with self._lock:
            self._last = time.monotonic()

    def note_registered(self) -> None:
        """A rank of this node is about to save, and relies on this agent to open the save."""
        with self._lock:
            self._registered_at = time.monotonic()

    def note_opened(self) -> None:
        with self._lock:
            self._registered_at = None

    @property
    def awaits_opening(self) -> bool:
        with self._lock:
            return self._registered_at is not None and time.monotonic() - self._registered_at < OPENING_WITHIN_S

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return self._under_way == 0

    def idle_s(self) -> float:
        with self._lock:
            return 0.0 if self._under_way else time.monotonic() - self._last


class WatchedRoutes(Routes):
    """Counts each answer as work, except for upkeep: else the agents of idle nodes would keep each other alive."""

    def __init__(self, activity: Activity, *args: Any) -> None:
        super().__init__(*args)
        self._activity = activity

    def answer(self, request: Request) -> Answer:
        parts, query = split_target(request.target)
        if parts in _WATCHING or (parts == _HOLDINGS and "upkeep" in query):  # no reason to stay for it
            return super().answer(request)
        with self._activity:
            try:
                return super().answer(request)
            finally:
                if request.method == "POST" and parts[:2] == _SAVES and len(parts) == 3:  # opens one, also if refused
                    self._activity.note_opened()
