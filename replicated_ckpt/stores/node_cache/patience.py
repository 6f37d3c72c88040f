"""Patience: how long one process waits, once in a load, for others of its node that give no sign of life."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from replicated_ckpt.stores.node_cache.cache import OtherRankCache

PATIENCE_S = 5.0
QUIET_S = 1.0
"""A sign of life that is younger is good; a process that is slow or waits for the processor looks no worse."""
_STEP_MAX_S = 0.1
_POLL_S = 0.0005
_POLL_MAX_S = 0.01


class Pause:
    """Waits that grow from half a millisecond to ten."""

    def __init__(self) -> None:
        self._pause_s = _POLL_S

    def __call__(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _POLL_MAX_S)


@dataclass
class Patience:
    """Whether one process has waited PATIENCE_S in vain. From then on in this load it waits for no silence to end."""

    is_over: bool = False


class Wait:
    """One wait of one thread. Of a long step, as this process itself was stopped, only a short one counts."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._last_s = time.monotonic()
        self._quiet_s = 0.0

    def find_lost(self, caches: Mapping[int, OtherRankCache]) -> list[int]:
        """Those of the ranks waited for that are not worth it any more: dead, or silent for too long."""
        now = time.monotonic()
        step_s = min(now - self._last_s, _STEP_MAX_S)
        self._last_s = now
        age_by_rank = {rank: _age_s(cache, now) for rank, cache in caches.items()}
        quiet = [rank for rank, age_s in age_by_rank.items() if age_s >= QUIET_S]
        self._quiet_s = self._quiet_s + step_s if quiet else 0.0
        has_waited = self._quiet_s > QUIET_S  # they may have been stopped with this process, and be about to go on
        is_over = self._patience.is_over
        silent = {rank for rank in quiet if is_over or (has_waited and age_by_rank[rank] >= PATIENCE_S)}
        dead = {rank for rank in quiet if not caches[rank].is_locked()}
        if silent - dead:
            self._patience.is_over = True
        return [rank for rank in quiet if rank in silent | dead]


def _age_s(cache: OtherRankCache, now: float) -> float:
    """How old its owner's last sign of life is. One of the future is of another host's clock, and worth nothing."""
    age_s = now - cache.board.pulse_ns / 1e9
    return age_s if age_s >= 0 else math.inf
