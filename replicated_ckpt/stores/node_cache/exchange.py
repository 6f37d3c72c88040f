"""The exchange: if several ranks of a node need the same data, one rank fetches it, and the others copy it from its cache.

A *piece* is a cell of 4 MiB that several ranks need. Its *fetcher* puts it into its cache, and the *takers* copy it.
Invariants, with the code that keeps each:

- S1: A cache exists before its name is sent, and keeps this name until its owner has left the load
  (`cache._create_locked_file`, `LoadAttempt._remote_needs`).
- S2: One decision for all ranks of a node assigns the pieces, their fetchers and takers. A rank without a cache, or with
  a changed plan, does not share (`dcp.load.sharing`).
- S3: A rank takes and fetches pieces in one order. Earlier pieces get memory first (`core.reading.windows.in_order`).
- S4: A rank has three reasons to wait. A taker waits for a piece. A fetcher waits for a slot until all takers have passed
  the piece four before. At its end, an owner waits until its takers have opened its cache: each taker opens it first.
- S5: Only its owner writes a cache. The owner records there when it ends, fails or shares nothing. If it dies, the file's
  lock is released (`Exchange.leave`, `OtherRankCache.is_locked`).
- S6: A taker checks the CRC32C and the number of its own copy, so the bytes are safe even if a wait is aborted
  (`OtherRankCache.copy`).
- S7: A rank waits 5 s for a silent rank, later in the same load only 1 s. It waits 1 s for a dead rank. A rank that
  waits for a working rank counts as working (`Exchange._wait_for`).
- S8: If one rank's request to a node timed out, all ranks of its own node ask that node last. If the request was for the
  survey or `.metadata`, all ranks of the load ask it last (`AnySource._in_order`, `plan_sharing`).

Running ranks never wait in a circle: for the first piece that a running taker has not passed, the fetcher needs only a
slot that all takers have passed. `tests/stores/node_cache/exchange_worlds.py` runs exchanges of 2 and 3 ranks in all
orders of steps.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from replicated_ckpt.core.reading.windows import CELL_BYTES, Unit, Window
from replicated_ckpt.stores.node_cache.cache import OVER, SLOTS, OtherRankCache, RankCache

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 5.0
QUIET_S = 1.0
"""Age up to which a pulse counts as fresh. Even a slow process, or one that waits for a processor, pulses as often."""
_STEP_MAX_S = 0.1
_POLL_S = 0.0005
_POLL_MAX_S = 0.01


class Pause:
    """Sleeps that grow from 0.5 ms to 10 ms."""

    def __init__(self) -> None:
        self._pause_s = _POLL_S

    def __call__(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _POLL_MAX_S)


@dataclass
class StallTimeout:
    """Whether this process has once waited STALL_TIMEOUT_S in vain. If so, its later waits in this load take QUIET_S."""

    is_over: bool = False


class Wait:
    """One wait of one thread. The time between two calls counts as at most _STEP_MAX_S: this process may be stopped."""

    def __init__(self, timeout: StallTimeout) -> None:
        self._timeout = timeout
        self._last_s = time.monotonic()
        self._quiet_s = 0.0

    def find_lost(self, caches: Mapping[int, OtherRankCache]) -> list[int]:
        """The ranks that this rank must no longer wait for: they are dead, or silent for too long."""
        now = time.monotonic()
        step_s = min(now - self._last_s, _STEP_MAX_S)
        self._last_s = now
        age_by_rank = {rank: _age_s(cache, now) for rank, cache in caches.items()}
        quiet = [rank for rank, age_s in age_by_rank.items() if age_s >= QUIET_S]
        self._quiet_s = self._quiet_s + step_s if quiet else 0.0
        has_waited = self._quiet_s > QUIET_S  # all may have been stopped together, and the others are about to continue
        is_over = self._timeout.is_over
        silent = {rank for rank in quiet if is_over or (has_waited and age_by_rank[rank] >= STALL_TIMEOUT_S)}
        dead = {rank for rank in quiet if not caches[rank].is_locked()}
        if silent - dead:
            self._timeout.is_over = True
        return [rank for rank in quiet if rank in silent | dead]


def _age_s(cache: OtherRankCache, now: float) -> float:
    """Seconds since the last pulse of the cache's owner. A pulse in the future is of another host's clock: infinite."""
    age_s = now - cache.board.pulse_ns / 1e9
    return age_s if age_s >= 0 else math.inf


class Found(Enum):
    """The state of a piece that another rank fetches."""

    THERE = "there"
    NOT_YET = "not yet"
    NEVER = "never"


class Exchange:
    """One rank's part in the exchange of its node during one load.

    The rank's own thread takes pieces; the threads that fetch ahead call `wait_for_slot`, `slot` and `put_piece`. The rank
    waits for another one only in `take_piece`, `wait_for_slot` and `wait_until_opened`.
    """

    def __init__(
        self, rank: int, cache: RankCache, others: Mapping[int, OtherRankCache], units: Sequence[Unit]
    ) -> None:
        """`others`: the caches that could be opened. `units`: the shared units, the same for all ranks of the node."""
        self._rank = rank
        self._cache = cache
        self._others = others
        self._lost = {taker for unit in units for taker in unit.takers} - {rank, *others}
        self._lock = threading.Lock()
        self._timeout = StallTimeout()
        self._memory: memoryview | None = None
        self._unit_by_cell = {unit.window.cell: unit for unit in units if rank in unit.takers}
        self._number_by_window: dict[Window, int] = {}
        takers_by_fetcher: dict[int, list[Sequence[int]]] = {rank: []}
        for unit in units:
            takers = takers_by_fetcher.setdefault(unit.fetcher, [])
            self._number_by_window[unit.window] = len(takers)
            takers.append(unit.takers)
        self._takers = takers_by_fetcher[rank]
        self._gives = True

    def begin_load(self) -> None:
        """Allocates room for this rank's pieces, and marks the other caches as opened."""
        try:
            self._cache.reserve(len(self._takers))
        except OSError as exc:
            log.warning("this rank reads nothing for the others of its node: %s", exc)
            self._gives = False
        # OVER: without room this rank gives nothing, and the others must fetch for themselves at once.
        self._cache.board.pass_pieces(self._rank, 0 if self._gives else OVER)
        for other in self._others:
            self._cache.board.pass_pieces(other, 0)
        # Owners of caches that could not be opened must not wait for this rank.
        for other in self._lost:
            self._cache.board.pass_pieces(other, OVER)

    def unit_of(self, cell: tuple[str, int]) -> Unit | None:
        """The shared unit of a cell, if this rank takes or fetches it; else None."""
        unit = self._unit_by_cell.get(cell)
        return None if unit is None or (self.is_own(unit) and not self._gives) else unit

    def is_own(self, unit: Unit) -> bool:
        return unit.fetcher == self._rank

    def number_of(self, unit: Unit) -> int:
        """The number of the unit's piece in the cache of its fetcher."""
        return self._number_by_window[unit.window]

    # Giving --------------------------------------------------------------------------------------------------------

    def slot_awaits(self, number: int) -> list[int]:
        """The ranks that still need the older piece in the slot for this rank's piece `number`."""
        before = number - SLOTS
        takers = self._takers[before] if before >= 0 else ()
        return [taker for taker in takers if not self._has_passed(taker, before)]

    def _has_passed(self, taker: int, number: int) -> bool:
        if taker == self._rank:
            return self._cache.board.count_passed(taker) > number
        if taker in self._lost:
            return True
        board = self._others[taker].board
        return board.has_left or board.count_passed(self._rank) > number

    def wait_for_slot(self, number: int, is_stopped: Callable[[], bool]) -> bool:
        """Waits until the slot of piece `number` is free; False if `is_stopped` returns True before."""
        wait, pause = Wait(self._timeout), Pause()
        while awaited := self.slot_awaits(number):
            # The load failed meanwhile: without this the thread would wait for takers that never come.
            if is_stopped():
                return False
            self._wait_for([taker for taker in awaited if taker != self._rank], wait)
            pause()
        return True

    def slot(self, number: int) -> memoryview:
        return self._cache.slot(number)

    def put_piece(self, number: int, piece: memoryview | None) -> memoryview:
        """Publishes piece `number` to the others, and returns its memory in the slot. None: each taker must fetch it."""
        return self._cache.put_piece(number, piece)

    def release(self, unit: Unit) -> None:
        """Marks a piece in this rank's cache as used by this rank. Once all takers have passed it, its slot is free."""
        self._cache.board.pass_pieces(self._rank, self.number_of(unit) + 1)

    # Taking --------------------------------------------------------------------------------------------------------

    def find_piece(self, unit: Unit) -> Found:
        """The state of a piece of another rank."""
        if unit.fetcher in self._lost:
            return Found.NEVER
        board, number = self._others[unit.fetcher].board, self.number_of(unit)
        # The owner writes the entry first, so this is read first: otherwise a new piece could seem lost.
        is_over = board.has_left or board.count_passed(unit.fetcher) > number
        there = board.entry(number)[0]
        if there == number:
            return Found.THERE
        return Found.NEVER if is_over or there > number else Found.NOT_YET

    def take_piece(self, unit: Unit) -> memoryview | None:
        """A piece that another rank has fetched, valid until the next call; None: this rank must fetch it itself."""
        wait, pause = Wait(self._timeout), Pause()
        while (found := self.find_piece(unit)) is Found.NOT_YET:
            self._wait_for([unit.fetcher], wait)
            pause()
        if self._memory is None:
            self._memory = memoryview(bytearray(CELL_BYTES))
        number = self.number_of(unit)
        piece = self._others[unit.fetcher].copy(number, self._memory) if found is Found.THERE else None
        with self._lock:
            # Another thread may have stopped waiting for the fetcher: the OVER that it recorded must stay.
            if unit.fetcher not in self._lost:
                self._cache.board.pass_pieces(unit.fetcher, number + 1)
        return piece

    # Signs of life -------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Marks this rank as alive: it works, or waits for something other than a rank."""
        self._cache.board.pulse(time.monotonic_ns())

    def _wait_for(self, ranks: Sequence[int], wait: Wait) -> None:
        """Looks once at the awaited ranks. Copies their pulses: this rank must not look more alive than they are."""
        caches = {rank: self._others[rank] for rank in ranks}
        for rank in wait.find_lost(caches):
            self.stop_waiting_for(rank)
        for cache in caches.values():
            self._cache.board.pulse(cache.board.pulse_ns)

    def stop_waiting_for(self, rank: int) -> None:
        """From now on this rank takes nothing from `rank`, and does not wait for it."""
        with self._lock:
            is_new = rank not in self._lost
            self._lost.add(rank)
            self._cache.board.pass_pieces(rank, OVER)
        if is_new:
            log.warning("this rank no longer waits for rank %d of its node, which shows no sign of life", rank)

    def mark_silent(self, node: str) -> None:
        self._cache.board.mark_silent(node)

    def is_silent(self, node: str) -> bool:
        """Whether a request of another rank to `node` has timed out."""
        return any(other.board.is_marked_silent(node) for other in self._others.values())

    # The end -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Ends this rank's part. Pieces in its cache can be taken as long as any process has the cache open."""
        self._cache.board.leave()

    def not_opened_by(self) -> list[int]:
        """The ranks that take from this one and have not opened its cache yet."""
        takers = {taker for takers in self._takers for taker in takers} - {self._rank}
        return [taker for taker in sorted(takers) if not self._has_passed(taker, -1)]

    def wait_until_opened(self) -> None:
        """Waits until all takers have opened the cache. Then its name may be removed."""
        wait, pause = Wait(self._timeout), Pause()
        while awaited := self.not_opened_by():
            self._wait_for(awaited, wait)
            pause()

    def close(self) -> None:
        self.leave()
        for other in self._others.values():
            other.close()
