"""Copies that no node has intact bytes for: each try reads whole shards on several nodes, for nothing."""

from collections.abc import Callable, Collection

from replicated_ckpt.core.upkeep.repair_plan import Action

RETRY_S = 900.0


class Hopeless:
    """What is not tried for RETRY_S, unless the plan has another action for it by then. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: dict[Action, tuple[float, str]] = {}

    def note(self, action: Action, why: str) -> None:
        self._failed[action] = self._clock() + RETRY_S, why

    def why_not(self, action: Action) -> str:
        """Why it failed a while ago; "" if it is to be tried."""
        until, why = self._failed.get(action, (0.0, ""))
        return why if self._clock() < until else ""

    def keep(self, planned: Collection[Action]) -> None:
        """Forgets what is not planned any more: if it is again, something has changed in between."""
        self._failed = {action: failed for action, failed in self._failed.items() if action in planned}
