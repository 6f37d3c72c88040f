"""What this node held a moment ago: a user who removes a directory on every node needs time before others bring it back."""

from collections.abc import Callable, Iterable

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.upkeep.repair_plan import Action, RepairPlan

_Place = tuple[str, str]


class JustRemoved:
    """The places, of one save under one name, that were emptied in the last `lost_after_s` seconds. One thread."""

    def __init__(self, lost_after_s: float, clock: Callable[[], float]) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._held: set[_Place] = set()
        self._gone_since: dict[_Place, float] = {}

    def look(self, holdings: Iterable[Holding]) -> None:
        """Compares what this node holds now with what it held at the last look."""
        now, held = self._clock(), {_place_of(holding) for holding in holdings}
        for place in self._held - held:
            self._gone_since.setdefault(place, now)
        self._held = held
        self._gone_since = {
            place: since
            for place, since in self._gone_since.items()
            if place not in held and now - since < self._lost_after_s
        }

    def actions_to_do(self, part: RepairPlan) -> list[Action]:
        """The part without what would put back what has just gone: that waits, and is done if others have it then still."""
        waiting = self._gone_since.keys() & {_place_of(action) for action in part.restore}
        return [action for action in part.actions if _place_of(action) not in waiting]


def _place_of(found: Holding | Action) -> _Place:
    return found.checkpoint_id, found.save_id
