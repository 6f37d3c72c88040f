"""Wall clocks of nodes. Each has its own offset, and may jump whenever a process reads it, also in the middle of a
save.
"""

from collections.abc import Sequence
from random import Random

UNIX_S = 1.7e9
"""The true wall clock at the begin of a simulation, minus the simulation's own clock."""
SMALL_S = [0, 0, 0.5, 3, 40, 600, 5 * 3600]
LARGE_S = [0, 0, 3 * 86_400, 31_557_600, 12 * 31_557_600]
"""Offsets from the true clock. All these times have ten digits, so that manifests keep their length."""
JUMP_SHARE, LARGE_SHARE = 0.1, 0.2


class TrueClocks:
    """All nodes show the same time."""

    are_true = True

    def offset_s(self, node: int) -> float:
        del node
        return 0.0


class OddClocks(TrueClocks):
    """Wrong clocks. Each reading is a function of the seed and of the number of readings so far, at which the clock
    jumps.

    A clock jumps by days or years at most once, like the clock of a host that reaches its time server after its start.
    """

    are_true = False

    def __init__(self, seed: int) -> None:
        self._random = Random(f"clocks {seed}")
        self._large_s: dict[int, float] = {}
        self._small_s: dict[int, float] = {}
        self._has_jumped_far: set[int] = set()
        self.jumps = 0

    def offset_s(self, node: int) -> float:
        """The offset of the node's clock, which ranks and agents of the node share. Called by a process that reads it
        now.
        """
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
