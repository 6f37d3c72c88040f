"""A model checker of the exchange: the ranks of one node, a few cells, and every order of their threads' steps.

The exchanges and caches are real. Each simulated rank takes the steps of a load (`dcp/load/loading.py`). `search`
explores them in every order, and visits each state once.

Time is not modelled: a wait for a rank may be abandoned whenever that rank is stopped or dead, and never while it runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from replicated_ckpt.core.reading.windows import CELL_BYTES, Unit, Window
from replicated_ckpt.stores.node_cache import cache as caches
from replicated_ckpt.stores.node_cache.cache import OVER, OtherRankCache, RankCache
from replicated_ckpt.stores.node_cache.exchange import Exchange, Found

SLOT_BYTES = 8


@dataclass(frozen=True)
class Cell:
    """The ranks that need a cell, and the rank that fetches it. A cell of a single rank goes through no cache."""

    takers: tuple[int, ...]
    fetcher: int


def worlds(ranks: int, cells: int) -> Iterator[tuple[Cell, ...]]:
    """Every combination of needs and fetchers for this number of ranks and cells."""
    subsets = [tuple(rank for rank in range(ranks) if bits >> rank & 1) for bits in range(1, 1 << ranks)]
    return product([Cell(takers, fetcher) for takers in subsets for fetcher in takers], repeat=cells)


@dataclass(frozen=True)
class Step:
    """The next step of a rank or of one of its threads, and its cell if there is one."""

    rank: int
    what: str
    cell: int = -1
    thread: int = -1
    other: int = -1


@dataclass(frozen=True)
class RankState:
    """The state of one rank. `threads` has the step and the cell of each prefetching thread."""

    life: str = "runs"
    has_joined: bool = False
    has_left: bool = False
    position: int = 0
    uses: int = -1
    next_task: int = 0
    threads: tuple[tuple[str, int], ...] = ()
    fetched: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    buffers: int = 1
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True)
class State:
    """The state of the world. `deaths`, `stops` and `failures` count the faults that may still happen."""

    ranks: tuple[RankState, ...]
    deaths: int
    stops: int
    failures: int
    memory: tuple[bytes, ...] = ()

    def with_rank(self, rank: int, **fields: object) -> "State":
        changed = replace(self.ranks[rank], **fields)  # type: ignore[arg-type]
        return replace(self, ranks=(*self.ranks[:rank], changed, *self.ranks[rank + 1 :]))


class World:
    """A world on real caches, whose state can be saved and restored."""

    def __init__(self, directory: Path, ranks: int, cells: Sequence[Cell], threads: int) -> None:
        self.threads = threads
        windows = [Window("shard", index * CELL_BYTES, SLOT_BYTES) for index in range(len(cells))]
        self.unit = {i: Unit(windows[i], cell.fetcher, cell.takers) for i, cell in enumerate(cells) if cell.takers[1:]}
        self.cells_of = [[i for i, cell in enumerate(cells) if rank in cell.takers] for rank in range(ranks)]
        self.tasks_of = [[i for i in mine if cells[i].fetcher == rank] for rank, mine in enumerate(self.cells_of)]
        self.caches = [RankCache.create(directory, ranks, SLOT_BYTES) for _ in range(ranks)]
        self.exchanges = []
        for rank, own in enumerate(self.caches):
            own.reserve(caches.SLOTS)
            others = {
                other: OtherRankCache.open(directory / cache.name, ranks, SLOT_BYTES)
                for other, cache in enumerate(self.caches)
                if other != rank
            }
            self.exchanges.append(Exchange(rank, own, others, list(self.unit.values())))

    def close(self) -> None:
        for exchange, cache in zip(self.exchanges, self.caches, strict=True):
            exchange.close()
            cache.close()

    def first(self, deaths: int, stops: int, failures: int) -> State:
        ranks = tuple(RankState(threads=(("idle", -1),) * self.threads) for _ in self.caches)
        return State(ranks, deaths, stops, failures, self._memory())

    def _memory(self) -> tuple[bytes, ...]:
        return tuple(bytes(part) for cache in self.caches for part in (_board(cache), _slots(cache)))

    def restore(self, state: State) -> None:
        for rank, cache in enumerate(self.caches):
            _board(cache)[:] = memoryview(state.memory[2 * rank]).cast("Q")
            _slots(cache)[:] = state.memory[2 * rank + 1]
            self.exchanges[rank]._lost = set(state.ranks[rank].lost)

    def _number(self, cell: int) -> int:
        return self.exchanges[0].number_of(self.unit[cell])

    # The possible next steps in the restored state -----------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        for rank, one in enumerate(state.ranks):
            if one.life == "stopped":
                yield Step(rank, "goes on")
            elif one.life == "runs":
                yield from self._faults(rank, one, state)
                yield from self._steps_of(rank, one, state) if one.has_joined else [Step(rank, "joins")]

    @staticmethod
    def _faults(rank: int, one: RankState, state: State) -> Iterator[Step]:
        if state.deaths:
            yield Step(rank, "dies")
        if state.stops:
            yield Step(rank, "stops")
        if state.failures and not one.has_joined:
            yield Step(rank, "stays out")

    def _steps_of(self, rank: int, one: RankState, state: State) -> Iterator[Step]:
        for thread, (what, cell) in enumerate(one.threads):
            yield from self._steps_of_thread(Step(rank, what, cell, thread), one, state.failures)
        yield from self._own_steps(rank, one)
        for other in self.awaited(rank, one):
            if state.ranks[other].life in {"stopped", "dead"}:
                yield Step(rank, "gives up", other=other)

    def _steps_of_thread(self, at: Step, one: RankState, failures: int) -> Iterator[Step]:
        if at.what == "idle" and one.next_task < len(self.tasks_of[at.rank]):
            cell = self.tasks_of[at.rank][one.next_task]
            if cell in self.unit or one.buffers:
                yield replace(at, what="begins", cell=cell)
        elif at.what == "waits" and not self.exchanges[at.rank].slot_awaits(self._number(at.cell)):
            yield replace(at, what="has a slot")
        elif at.what == "reads":
            yield replace(at, what="has fetched")
            if failures:
                yield replace(at, what="cannot fetch")

    def _own_steps(self, rank: int, one: RankState) -> Iterator[Step]:
        if one.uses >= 0:
            yield Step(rank, "has used", one.uses)
        elif one.position == len(self.cells_of[rank]):
            if not one.has_left:
                yield Step(rank, "leaves")
            elif not self.exchanges[rank].not_opened_by():
                yield Step(rank, "is done")
        else:
            cell = self.cells_of[rank][one.position]
            if cell not in self.tasks_of[rank]:
                if self.exchanges[rank].find_piece(self.unit[cell]) is not Found.NOT_YET:
                    yield Step(rank, "takes", cell)
            elif cell in one.fetched | one.failed:
                yield Step(rank, "uses" if cell in one.fetched else "fails", cell)

    def awaited(self, rank: int, one: RankState) -> set[int]:
        """The ranks for which this rank waits now."""
        found: set[int] = set()
        for what, cell in one.threads:
            found |= set(self.exchanges[rank].slot_awaits(self._number(cell))) if what == "waits" else set()
        if one.has_left:
            found |= set(self.exchanges[rank].not_opened_by())
        elif one.position < len(self.cells_of[rank]):
            cell = self.cells_of[rank][one.position]
            if cell not in self.tasks_of[rank] and self.exchanges[rank].find_piece(self.unit[cell]) is Found.NOT_YET:
                found.add(self.unit[cell].fetcher)
        return found - {rank}

    # The effects of a step ------------------------------------------------------------------------------------------

    def after(self, state: State, step: Step) -> tuple[State, bool]:
        """The state after a step, and whether a rank had to fetch a piece that another rank was to fetch."""
        rank, one, exchange = step.rank, state.ranks[step.rank], self.exchanges[step.rank]
        is_alone = False
        if step.thread >= 0:
            state = self._after_thread(state, step)
        elif step.what == "takes":
            piece = exchange.take_piece(self.unit[step.cell])
            assert piece is None or bytes(piece) == content(step.cell), "wrong bytes were taken"
            is_alone = piece is None
            state = state.with_rank(rank, position=one.position + 1)
        elif step.what == "has used":
            given = exchange.slot(self._number(step.cell))
            assert bytes(given) == content(step.cell), "a slot was used again while its owner used it"
            exchange.release(self.unit[step.cell])
            state = state.with_rank(rank, uses=-1, position=one.position + 1)
        elif step.what == "uses":
            shared = step.cell in self.unit
            after = {"uses": step.cell} if shared else {"position": one.position + 1, "buffers": one.buffers + 1}
            state = state.with_rank(rank, fetched=one.fetched - {step.cell}, **after)
        else:
            state = self._after_life(state, step)
        return replace(state, memory=self._memory()), is_alone

    def _after_thread(self, state: State, step: Step) -> State:
        rank, one = step.rank, state.ranks[step.rank]
        fields: dict[str, object] = {}
        does = ("idle", -1)
        if step.what == "begins":
            fields["next_task"] = one.next_task + 1
            if step.cell not in self.unit:
                fields["buffers"] = one.buffers - 1
            does = ("waits" if step.cell in self.unit else "reads", step.cell)
        elif step.what == "has a slot":
            does = ("reads", step.cell)
        else:
            is_there = step.what == "has fetched"
            if step.cell in self.unit:
                piece = memoryview(bytearray(content(step.cell))) if is_there else None
                self.exchanges[rank].put_piece(self._number(step.cell), piece)
            fields["fetched" if is_there else "failed"] = (one.fetched if is_there else one.failed) | {step.cell}
            state = state if is_there else replace(state, failures=state.failures - 1)
        return state.with_rank(
            rank, threads=(*one.threads[: step.thread], does, *one.threads[step.thread + 1 :]), **fields
        )

    def _after_life(self, state: State, step: Step) -> State:
        rank, exchange = step.rank, self.exchanges[step.rank]
        fields: dict[str, object] = {}
        match step.what:
            case "dies":
                state, fields = replace(state, deaths=state.deaths - 1), {"life": "dead", "threads": ()}
            case "stops":
                state, fields = replace(state, stops=state.stops - 1), {"life": "stopped"}
            case "goes on":
                fields = {"life": "runs"}
            case "joins":
                fields = {"has_joined": True, "lost": self._join(state, rank)}
            case "gives up":
                exchange.stop_waiting_for(step.other)
                fields = {"lost": frozenset(exchange._lost)}
            case "leaves":
                exchange.leave()
                fields = {"has_left": True}
            case "stays out" | "fails":
                exchange.leave()
                state = replace(state, failures=state.failures - (step.what == "stays out"))
                fields = {"life": "failed", "threads": ()}
            case "is done":
                fields = {"life": "done", "threads": ()}
        return state.with_rank(rank, **fields)

    def _join(self, state: State, rank: int) -> frozenset[int]:
        """The ranks whose caches have already lost their names and cannot be opened."""
        gone = frozenset(i for i, one in enumerate(state.ranks) if i != rank and one.life in {"failed", "done"})
        for other in range(len(state.ranks)):
            self.caches[rank].board.pass_pieces(other, OVER if other in gone else 0)
        return gone


@dataclass
class Outcome:
    """What a search found."""

    states: int = 0
    fetched_alone: int = 0
    ends: set[tuple[str, ...]] = field(default_factory=set)


def search(world: World, first: State) -> Outcome:
    """Explores every state that can be reached from `first`.

    Raises:
        AssertionError: running ranks cannot go on, or bytes are wrong; the message has the steps that lead there.
    """
    outcome = Outcome()
    came_by: dict[State, tuple[State, Step] | None] = {first: None}
    waiting = [first]
    while waiting:
        state = waiting.pop()
        outcome.states += 1
        world.restore(state)
        can_go_on = False
        for step in list(world.steps(state)):
            world.restore(state)
            try:
                after, is_alone = world.after(state, step)
            except AssertionError as exc:
                raise AssertionError(f"{exc} after {[*_path(came_by, state), step]}") from exc
            outcome.fetched_alone += is_alone
            can_go_on |= after != state and step.what not in {"dies", "stops", "goes on"}
            if after not in came_by:
                came_by[after] = (state, step)
                waiting.append(after)
        if not can_go_on:
            outcome.ends.add(tuple(one.life for one in state.ranks))
            stuck = [rank for rank, one in enumerate(state.ranks) if one.life == "runs"]
            assert not stuck, f"ranks {stuck} cannot go on after {_path(came_by, state)}"
    return outcome


def _path(came_by: Mapping[State, tuple[State, Step] | None], state: State) -> list[Step]:
    steps = []
    while (came := came_by[state]) is not None:
        state, step = came
        steps.append(step)
    return steps[::-1]


@contextmanager
def opened(directory: Path, ranks: int, cells: Sequence[Cell], threads: int) -> Iterator[World]:
    world = World(directory, ranks, cells, threads)
    try:
        yield world
    finally:
        world.close()


def content(cell: int) -> bytes:
    return bytes([cell + 1] * SLOT_BYTES)


def _board(cache: RankCache) -> memoryview:
    return cache.board._words


def _slots(cache: RankCache) -> memoryview:
    start = cache._shape.header_bytes
    return memoryview(cache._map)[start : start + caches.SLOTS * SLOT_BYTES]
