"""Sharing: the ranks of a load agree on the windows that each of them fetches for the others of its node."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.planner import LoadPlan

from replicated_ckpt.core.reading.windows import CELL_BYTES, Unit, Window, plan_shared_units
from replicated_ckpt.stores.node_cache.cache import OtherRankCache, RankCache
from replicated_ckpt.stores.node_cache.exchange import Exchange

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteNeeds:
    """The windows that a rank needs and its node lacks. They go to the coordinator in `LoadPlan.storage_data`.

    `cache` is the name of the rank's cache, which exists by now. With None the rank shares nothing: it needs no remote
    windows, or its cache could not be made. `silent` are nodes that timed out while the rank read the metadata.
    """

    node_id: str
    windows: tuple[Window, ...]
    cache: str | None
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NodeSharing:
    """The windows that ranks of one node fetch for each other. All these ranks get the same, in
    `LoadPlan.storage_data`.

    `silent`: nodes that any rank of the load found silent while it read the metadata.
    """

    cache_by_rank: Mapping[int, str]
    units: tuple[Unit, ...]
    silent: frozenset[str] = frozenset()


def plan_sharing(plans: Sequence[LoadPlan], shards: Sequence[str]) -> list[LoadPlan]:
    """The plans of all ranks, each with the shared windows of its node, if any, and with the silent nodes."""
    ranks_by_node: dict[str, dict[int, RemoteNeeds]] = {}
    silent: frozenset[str] = frozenset()
    for rank, plan in enumerate(plans):
        needs = plan.storage_data
        if isinstance(needs, RemoteNeeds):
            silent |= needs.silent
            if needs.cache is not None:
                ranks_by_node.setdefault(needs.node_id, {})[rank] = needs
    sharing_by_rank: dict[int, NodeSharing] = {}
    for needs_by_rank in ranks_by_node.values():
        units = plan_shared_units({rank: needs.windows for rank, needs in needs_by_rank.items()}, shards)
        # A rank that takes nothing joins no exchange: otherwise the others would wait for its signs of life.
        takers = sorted({taker for unit in units for taker in unit.takers})
        sharing = NodeSharing({rank: str(needs_by_rank[rank].cache) for rank in takers}, tuple(units), silent)
        sharing_by_rank |= dict.fromkeys(takers, sharing)
    unshared = NodeSharing({}, (), silent) if silent else None
    return [replace(plan, storage_data=sharing_by_rank.get(rank, unshared)) for rank, plan in enumerate(plans)]


def join_exchange(
    sharing: NodeSharing, rank: int, cache: RankCache, directory: Path, world_size: int, windows: Iterable[Window]
) -> Exchange | None:
    """This rank's part in `sharing`; None if its plan was changed after the units were made from it."""
    # A planner may change a plan in finish_plan: other ranks would then wait for windows that this one never fetches.
    if not _matches_units(sharing.units, rank, windows):
        log.warning("rank %d reads only for itself: its plan changed after the ranks had agreed on it", rank)
        return None
    others = {}
    for other, name in sharing.cache_by_rank.items():
        if other != rank:
            with contextlib.suppress(OSError, ValueError):  # that rank failed or died: this one reads for itself
                others[other] = OtherRankCache.open(directory / name, world_size, CELL_BYTES)
    exchange = Exchange(rank, cache, others, sharing.units)
    exchange.begin_load()
    return exchange


def _matches_units(units: Sequence[Unit], rank: int, windows: Iterable[Window]) -> bool:
    """Whether a rank that reads `windows` needs exactly what the units assume."""
    hull_by_cell = {unit.window.cell: unit.window for unit in units if rank in unit.takers}
    met = set()
    for window in windows:
        hull = hull_by_cell.get(window.cell)
        if hull is not None:
            if window.offset < hull.offset or window.end > hull.end:
                return False
            met.add(window.cell)
    return met == set(hull_by_cell)
