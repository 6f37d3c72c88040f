"""Sharing: what several ranks of one node need from elsewhere, one fetches, and the others take it from its spool."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.planner import LoadPlan

from replicated_ckpt.core.windows import CELL_BYTES, Unit, Window, shared_units
from replicated_ckpt.dcp.shard_reader import ShardReader
from replicated_ckpt.stores.spool import SLOTS, Pause, Spool, TakenSpool, spool_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteNeeds:
    """What one rank needs that its node does not hold. Goes to the coordinator in `LoadPlan.storage_data`."""

    node_id: str
    windows: tuple[Window, ...]


@dataclass(frozen=True)
class NodeSharing:
    """What the ranks of one node fetch for each other, the same for all of them. Comes back in `LoadPlan.storage_data`."""

    nonce: str
    ranks: tuple[int, ...]
    units: tuple[Unit, ...]


def planned(plans: Sequence[LoadPlan], shards: Sequence[str]) -> list[LoadPlan]:
    """The plans of all ranks, with what each rank's node shares, if it shares anything."""
    ranks_by_node: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, RemoteNeeds):
            ranks_by_node.setdefault(plan.storage_data.node_id, []).append(rank)
    sharing_by_rank: dict[int, NodeSharing] = {}
    for ranks in ranks_by_node.values():
        if len(ranks) > 1:
            units = shared_units({rank: plans[rank].storage_data.windows for rank in ranks}, shards)
            sharing = NodeSharing(uuid.uuid4().hex, tuple(ranks), units)
            sharing_by_rank |= dict.fromkeys(ranks, sharing) if units else {}
    return [replace(plan, storage_data=sharing_by_rank.get(rank)) for rank, plan in enumerate(plans)]


class OwnUnits:
    """What this rank fetches for the others of its node, in a spool of its own."""

    def __init__(
        self, spool: Spool, me: int, takers: Sequence[Sequence[int]], others: Mapping[int, TakenSpool]
    ) -> None:
        """`takers`: of each piece, as positions among the node's ranks. `others`: their spools, to see that they live."""
        self._spool = spool
        self._me = me
        self._takers = takers
        self._others = others
        self._is_closed = False

    def pulse(self) -> None:
        self._spool.pulse()

    def fetched(self, number: int, window: Window, reader: ShardReader, is_stopped: Callable[[], bool]) -> memoryview:
        """Fetches piece `number` into its slot and gives it to the others; for this rank alone if they keep the slot."""
        is_free = self._waited(number, is_stopped)
        memory = self._spool.slot(number) if is_free else memoryview(bytearray(CELL_BYTES))
        try:
            piece = reader.read(window.shard, window.offset, window.length, memory)
        except BaseException:
            if is_free:
                self._spool.put(number, None)
            raise
        if is_free:
            self._spool.put(number, piece)
        return piece

    def taken(self, number: int) -> None:
        self._spool.take_own(self._me, number)

    def _waited(self, number: int, is_stopped: Callable[[], bool]) -> bool:
        """Whether the slot of piece `number` became free. It does not if a taker of what lies there is gone."""
        pause, before = Pause(), number - SLOTS
        while before >= 0 and not self._is_closed:
            lagging = [taker for taker in self._takers[before] if not self._spool.has_taken(taker, before)]
            if not lagging:
                return True
            gone = [taker for taker in lagging if taker != self._me and not self._others[taker].lives()]
            if gone or is_stopped():
                log.warning("%d ranks of this node do not take what is fetched for them", len(gone))
                self.close_for_others()
            pause()
        return not self._is_closed

    def close_for_others(self) -> None:
        self._is_closed = True
        self._spool.close_for_others()

    def linger(self) -> None:
        """Waits until the others have taken everything, or are gone."""
        for number in range(max(0, len(self._takers) - SLOTS), len(self._takers)):
            pause = Pause()
            while not self._is_closed:
                lagging = [taker for taker in self._takers[number] if not self._spool.has_taken(taker, number)]
                if not any(taker != self._me and self._others[taker].lives() for taker in lagging):
                    break
                self.pulse()
                pause()

    def close(self) -> None:
        self._spool.close()


class Sharing:
    """One rank's part in what its node shares during one load. One thread, but for what `own` says."""

    def __init__(self, sharing: NodeSharing, rank: int, directory: Path) -> None:
        """Raises OSError: the spool cannot be made."""
        ranks = sharing.ranks
        self._me = ranks.index(rank)
        self._number_by_unit: dict[Window, int] = {}
        counts: dict[int, list[Sequence[int]]] = {other: [] for other in ranks}
        self._unit_by_cell: dict[tuple[str, int], Unit] = {}
        for unit in sharing.units:
            self._number_by_unit[unit.window] = len(counts[unit.fetcher])
            counts[unit.fetcher].append([ranks.index(taker) for taker in unit.takers])
            if rank in unit.takers:
                self._unit_by_cell[unit.window.cell] = unit
        spool = Spool(spool_path(directory, sharing.nonce, rank), len(ranks), CELL_BYTES)
        self._taken = {
            position: TakenSpool(spool_path(directory, sharing.nonce, other), self._me, len(ranks), CELL_BYTES)
            for position, other in enumerate(ranks)
            if other != rank
        }
        self._position = {other: position for position, other in enumerate(ranks)}
        self.own = OwnUnits(spool, self._me, counts[rank], self._taken)
        self._rank = rank

    def unit_of(self, window: Window) -> Unit | None:
        """The shared unit that holds a window of this rank, if one does."""
        unit = self._unit_by_cell.get(window.cell)
        return unit if unit and unit.window.offset <= window.offset and window.end <= unit.window.end else None

    def is_own(self, unit: Unit) -> bool:
        return unit.fetcher == self._rank

    def number_of(self, unit: Unit) -> int:
        """Its number in the spool of its fetcher."""
        return self._number_by_unit[unit.window]

    def taken_from_other(self, unit: Unit) -> memoryview | None:
        """What another rank has fetched; None if it does not come, so that this rank has to fetch it."""
        spool = self._taken[self._position[unit.fetcher]]
        number, pause = self.number_of(unit), Pause()
        spool.wait_begins()
        while (found := spool.peek(number)) is None:
            self.own.pulse()
            pause()
        self.own.pulse()
        return found if isinstance(found, memoryview) else None

    def done(self, unit: Unit) -> None:
        """This rank has used the unit: its slot may be used again as far as this rank goes."""
        if self.is_own(unit):
            self.own.taken(self.number_of(unit))
        else:
            self._taken[self._position[unit.fetcher]].taken(self.number_of(unit))

    def close(self) -> None:
        for spool in self._taken.values():
            spool.close()
        self.own.close()
