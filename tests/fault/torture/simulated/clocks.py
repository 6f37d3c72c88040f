"""Wall clocks of nodes: each has an offset of its own, and jumps, also in the middle of a save, when a process reads it."""

from collections.abc import Sequence
from random import Random

UNIX_S = 1.7e9
"""What a true clock shows when a simulation begins, less what its own clock does."""
SMALL_S = [0, 0, 0.5, 3, 40, 600, 5 * 3600]
LARGE_S = [0, 0, 3 * 86_400, 31_557_600, 12 * 31_557_600]
"""A clock is so far ahead of the true one, or behind it. Ten digits show all these times: no manifest gets longer."""
JUMP_SHARE, LARGE_SHARE = 0.1, 0.2


class TrueClocks:
    """Every node shows the same time."""

    are_true = True

    def offset_s(self, node: int) -> float:
        del node
        return 0.0


class OddClocks(TrueClocks):
    """What each node shows is a function of the seed, and of how often its processes read it: that is when it jumps.

    Days and years it jumps once at most, as where a host that has started hears the time.
    """

    are_true = False

    def __init__(self, seed: int) -> None:
        self._random = Random(f"clocks {seed}")
        self._large_s: dict[int, float] = {}
        self._small_s: dict[int, float] = {}
        self._has_jumped_far: set[int] = set()
        self.jumps = 0

    def offset_s(self, node: int) -> float:
        """Ranks and agents of a node have one clock, which one of them reads now."""
        if node not in self._large_s:
            self._large_s[node], self._small_s[node] = self._draw(LARGE_S), self._draw(SMALL_S)
        elif self._random.random() < JUMP_SHARE:
            self.jumps += 1
            self._small_s[node] = self._draw(SMALL_S)
            if node not in self._has_jumped_far and self._random.random() < LARGE_SHARE:
                self._has_jumped_far.add(node)
                self._large_s[node] = self._draw(LARGE_S)
        return self._large_s[node] + self._small_s[node]

    def _draw(self, offsets_s: Sequence[float]) -> float:
        return self._random.choice(offsets_s) * self._random.choice([1, -1])
