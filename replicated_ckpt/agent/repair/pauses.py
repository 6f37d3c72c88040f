"""Pauses between rounds of re-protection: short ones first, as nodes publish a save one after the other."""

PAUSE_S = 2.0
FIRST_PAUSE_S = 0.1
IDLE_PAUSE_S = 15.0
_FIRST_PER_NODE_S, _IDLE_PER_NODE_S = 0.002, 0.05
"""Many nodes ask each other less often, so that an agent answers about as many questions a second."""

RESTS_PER_ROUND = 4.0
"""After a round that copied nothing, its thread rests this many times the processor time of the round.

A round looks at every checkpoint, and each save wakes the thread. Without the rest each checkpoint would make saves dearer.
"""


class Pauses:
    """How long one thread waits after each round, unless it is woken before.

    While there is work: FIRST_PAUSE_S after the round that it was woken for, then twice as long each time, up to PAUSE_S.
    Else `idle_s`, which is a bound on the others, too.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._next_s = PAUSE_S

    def begin(self, nodes: int) -> None:
        """A round begins for which the thread was woken."""
        self._next_s = min(PAUSE_S, max(FIRST_PAUSE_S, _FIRST_PER_NODE_S * nodes))

    def after(self, nodes: int, *, is_active: bool) -> float:
        """Seconds until the next round, which looks at so many nodes."""
        if not is_active:
            return max(self._idle_s, _IDLE_PER_NODE_S * nodes)
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, PAUSE_S)
        return min(pause_s, self._idle_s)
