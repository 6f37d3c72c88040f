"""Routes of a running agent: what they answer counts as its work."""

import threading
import time
from typing import Any

from replicated_ckpt.agent.http.routes import Routes, is_upkeep
from replicated_ckpt.agent.requests.request import Answer, Request


class Activity:
    """When the agent last had work. Requests under way count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._last = time.monotonic()

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

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return self._under_way == 0

    def idle_s(self) -> float:
        with self._lock:
            return 0.0 if self._under_way else time.monotonic() - self._last


class WatchedRoutes(Routes):
    """Routes that count as work while they answer, but for upkeep: else the agents of idle nodes keep each other up."""

    def __init__(self, activity: Activity, *args: Any) -> None:
        super().__init__(*args)
        self._activity = activity

    def answer(self, request: Request) -> Answer:
        if is_upkeep(request.target):
            return super().answer(request)
        with self._activity:
            return super().answer(request)
