"""Ranks of a node share fetched data: the coordinator's plan of who fetches what, and which ranks join."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest
from torch.distributed.checkpoint.planner import LoadPlan

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.core.reading.windows import CELL_BYTES, Window
from replicated_ckpt.dcp.load.loading import Loading
from replicated_ckpt.dcp.load.shard_reader import Findings
from replicated_ckpt.dcp.load.sharing import NodeSharing, RemoteNeeds, join_exchange, plan_sharing
from replicated_ckpt.errors import ShardLost, StoreUnavailable
from replicated_ckpt.stores.node_cache.cache import RankCache, is_any_cache_locked
from replicated_ckpt.stores.node_cache.exchange import Exchange

SHARDS = ["__0_0.distcp"]
WINDOWS = tuple(Window(SHARDS[0], index * CELL_BYTES, 1000) for index in range(4))


def plan(node: str, windows: tuple[Window, ...], cache: str | None) -> LoadPlan:
    return LoadPlan([], storage_data=RemoteNeeds(node, windows, cache))


def sharing_of(plans: list[LoadPlan]) -> list[NodeSharing | None]:
    return [found.storage_data for found in plan_sharing(plans, SHARDS)]


def test_ranks_of_one_node_share_what_several_of_them_need() -> None:
    """Ranks of a node that need the same windows get each other's caches and the shared units. Other ranks get nothing."""
    plans = [
        plan("a", WINDOWS, "cache-0"),
        plan("b", WINDOWS, "cache-1"),
        LoadPlan([]),
        plan("a", WINDOWS[:2], "cache-3"),
        plan("a", (Window(SHARDS[0], 9 * CELL_BYTES, 1000),), "cache-4"),
    ]
    first, lone, local, fourth, apart = sharing_of(plans)
    assert (lone, local, apart) == (None, None, None)
    assert first is not None
    assert fourth == first
    assert first.cache_by_rank == {0: "cache-0", 3: "cache-3"}
    assert [(unit.window, unit.takers) for unit in first.units] == [(window, (0, 3)) for window in WINDOWS[:2]]


def test_a_rank_that_could_not_make_its_cache_is_left_out() -> None:
    """A rank without a cache file, as on a full disk, fetches for itself. No other rank waits for that rank."""
    first, second, third = sharing_of(
        [plan("a", WINDOWS, "cache-0"), plan("a", WINDOWS, None), plan("a", WINDOWS, "cache-2")]
    )
    assert second is None
    assert first == third
    assert first is not None
    assert list(first.cache_by_rank) == [0, 2]
    assert sharing_of([plan("a", WINDOWS, "cache-0"), plan("a", WINDOWS, None)]) == [None, None]


def test_a_node_silent_for_metadata_is_reported_to_every_rank() -> None:
    """A node was silent while one rank read the metadata: every rank gets its name. If all nodes answered, nothing more
    is sent.
    """
    met = RemoteNeeds("a", (), None, frozenset({"x"}))
    plans = [LoadPlan([], storage_data=met), plan("b", WINDOWS, "0"), plan("b", WINDOWS, "1"), LoadPlan([])]
    told = sharing_of(plans)
    assert [None if sharing is None else sorted(sharing.silent) for sharing in told] == [["x"]] * 4
    assert [bool(sharing and sharing.units) for sharing in told] == [False, True, True, False]
    assert sharing_of([LoadPlan([]), plan("b", WINDOWS, "0")]) == [None, None]


def part(directory: Path, caches: list[RankCache], rank: int, windows: tuple[Window, ...]) -> Exchange | None:
    sharing = sharing_of([plan("a", WINDOWS[:2], cache.name) for cache in caches])[rank]
    assert sharing is not None
    return join_exchange(sharing, rank, caches[rank], directory, 2, windows)


@pytest.mark.parametrize(
    "windows", [WINDOWS[:1], (), (WINDOWS[0], Window(SHARDS[0], CELL_BYTES, 1001)), WINDOWS[2:]], ids=len
)
def test_a_rank_whose_plan_changed_does_not_join(tmp_path: Path, windows: tuple[Window, ...]) -> None:
    """A rank that needs less than planned, or more of a shared cell, does not join. Otherwise it or the others would
    wait.
    """
    caches = [RankCache.create(tmp_path, 2, CELL_BYTES) for _ in range(2)]
    assert part(tmp_path, caches, 0, windows) is None
    for cache in caches:
        cache.close()


def test_a_node_silent_for_one_rank_is_reported_to_the_others(tmp_path: Path) -> None:
    """After a node timed out for one rank, the other ranks of the same host treat that node as silent."""
    caches = [RankCache.create(tmp_path, 2, CELL_BYTES) for _ in range(2)]
    findings = [Findings(), Findings()]
    for rank in range(2):
        findings[rank].exchange = part(tmp_path, caches, rank, WINDOWS)
        assert findings[rank].exchange is not None
    findings[0].record_finding(SHARDS[0], "node-x", StoreUnavailable("x", "GET", "y", "timed out"), is_suspect=False)
    assert findings[1].is_silent("node-x")
    assert not findings[1].is_silent("node-y")
    for finding, cache in zip(findings, caches, strict=True):
        assert finding.exchange is not None
        finding.exchange.close()
        cache.close()


def test_a_load_that_failed_in_its_planning_keeps_no_cache(tmp_path: Path) -> None:
    """A load that failed in planning releases its cache. A locked cache would slow the agent's repairs while the reader
    exists.
    """
    reader = ReplicatedReader(tmp_path)
    reader._attempt._cache = RankCache.create(tmp_path, 1, CELL_BYTES)
    assert is_any_cache_locked(tmp_path)
    reader.release_files()
    assert not is_any_cache_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


class OneBlockLost:
    """Reads a shard of zeros in which one block has no intact copy."""

    findings = Findings()

    def sibling(self) -> Self:
        return self

    def read_range(self, shard: str, offset: int, length: int, memory: memoryview | None = None) -> memoryview:
        if offset <= 7 * BLOCK_BYTES < offset + length:
            raise ShardLost("step-1", {shard: "rank 0"}, ())
        return memoryview(bytearray(length)) if memory is None else memory[:length]

    def close(self) -> None:
        """Nothing is open."""


def test_a_lost_block_that_no_rank_needs_fails_no_load(tmp_path: Path) -> None:
    """One rank fetches a span for two, with a lost block between their needs: each rank then fetches what it needs, and
    both loads succeed.
    """
    windows = [Window(SHARDS[0], block * BLOCK_BYTES, 1000) for block in (0, 9)]
    caches = [RankCache.create(tmp_path, 2, CELL_BYTES) for _ in range(2)]
    (sharing, _) = sharing_of([plan("a", tuple(windows), cache.name) for cache in caches])
    assert sharing is not None
    exchanges = [join_exchange(sharing, rank, caches[rank], tmp_path, 2, windows) for rank in range(2)]

    def load(rank: int) -> list[Window]:
        fed = list[Window]()
        loading = Loading(OneBlockLost(), lambda _: True, exchanges[rank])  # type: ignore[arg-type]
        loading.run(windows, SHARDS, lambda window, _: fed.append(window), lambda _: None)
        return fed

    with ThreadPoolExecutor() as ranks:
        assert list(ranks.map(load, range(2))) == [windows, windows]
    for exchange, cache in zip(exchanges, caches, strict=True):
        assert exchange is not None
        exchange.close()
        cache.close()
