"""Actions of a repair plan that wait: some would undo a user's removal, others just failed for lack of intact bytes."""

from collections.abc import Callable, Collection, Iterable

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.upkeep.repair_plan import Action

RETRY_S = 900.0
"""Between two tries of a copy for which no node has intact bytes: each try reads whole shards on several nodes."""

_Place = tuple[str, str]


class DeferredActions:
    """Planned actions that are not done now. One thread.

    A user who deletes a directory on every node needs time before other nodes copy it back. So a save that this node held
    at the last look, and holds no more, is not copied here for `lost_after_s` seconds.
    """

    def __init__(self, lost_after_s: float, clock: Callable[[], float]) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._held: set[_Place] = set()
        self._gone_since: dict[_Place, float] = {}
        self._failed: dict[Action, tuple[float, str]] = {}

    def look(self, holdings: Iterable[Holding], planned: Collection[Action]) -> None:
        """Compares this node's holdings with the last look, and forgets failures of actions that are no longer planned."""
        now, held = self._clock(), {_place_of(holding) for holding in holdings}
        for place in self._held - held:
            self._gone_since.setdefault(place, now)
        self._held = held
        self._gone_since = {
            place: since
            for place, since in self._gone_since.items()
            if place not in held and now - since < self._lost_after_s
        }
        # Forgotten with the plan: a node that comes back may have intact bytes, and is asked at once.
        self._failed = {action: failed for action, failed in self._failed.items() if action in planned}

    def is_removed_now(self, action: Action) -> bool:
        """Whether the save was deleted here a moment ago. The action is done later, if other nodes still have the save."""
        return _place_of(action) in self._gone_since

    def note_failure(self, action: Action, why: str) -> None:
        """No node has intact bytes for it."""
        self._failed[action] = self._clock() + RETRY_S, why

    def why_not(self, action: Action) -> str:
        """Why an action failed less than RETRY_S ago; "" if it is to be tried."""
        until, why = self._failed.get(action, (0.0, ""))
        return why if self._clock() < until else ""


def _place_of(found: Holding | Action) -> _Place:
    return found.checkpoint_id, found.save_id
