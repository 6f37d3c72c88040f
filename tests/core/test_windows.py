"""Windows cover the needed bytes, and ranks of a node share each cell that several need, in one order."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.core.reading.windows import (
    CELL_BYTES,
    LOCAL_WINDOW_BYTES,
    ByteRange,
    Window,
    in_order,
    plan_shared_units,
    windows_of,
)

SHARDS = [f"__{rank}_0.distcp" for rank in range(6)]
RANGES = st.lists(st.builds(ByteRange, st.integers(0, 20 << 20), st.integers(0, 6 << 20)), max_size=8)


def blocks(start: int, end: int) -> set[int]:
    return set(range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)))


@settings(deadline=None, max_examples=40)
@given(RANGES, st.sampled_from([LOCAL_WINDOW_BYTES, CELL_BYTES]), RANGES)
def test_windows_cover_what_is_needed_and_read_no_other_block(
    ranges: list[ByteRange], window_bytes: int, straight: list[ByteRange]
) -> None:
    """Every needed byte is in one window, and only blocks with needed bytes are read, each once."""
    windows = windows_of("s", ranges, window_bytes, straight)
    assert all(first.end <= second.offset for first, second in pairwise(windows))
    assert all(window.offset // window_bytes == (window.end - 1) // window_bytes for window in windows)
    for part in ranges:
        inside = sum(max(0, min(part.end, one.end) - max(part.offset, one.offset)) for one in windows)
        assert inside == part.length
    needed = set().union(*(blocks(part.offset, part.end) for part in ranges if part.length))
    read = [block for window in windows for block in blocks(window.offset, window.end)]
    assert sorted(read) == sorted(needed)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.tuples(st.sampled_from(SHARDS), RANGES), max_size=3), min_size=2, max_size=4))
def test_ranks_of_a_node_fetch_each_block_once(needs: list[list[tuple[str, list[ByteRange]]]]) -> None:
    """Each block is fetched by one rank, each shared unit by a rank that needs it, and all ranks meet units in one
    order.
    """
    windows_by_rank = {}
    for rank, of_rank in enumerate(needs):
        by_shard = dict(of_rank)
        windows_by_rank[rank] = in_order(
            [window for shard, ranges in by_shard.items() for window in windows_of(shard, ranges, CELL_BYTES)], SHARDS
        )
    units = plan_shared_units(windows_by_rank, SHARDS)
    shared = {unit.window.cell: unit for unit in units}
    fetched: list[tuple[str, int]] = []
    for rank, windows in windows_by_rank.items():
        private = [window for window in windows if window.cell not in shared]
        own = [unit.window for unit in units if unit.fetcher == rank]
        for window in [*private, *own]:
            fetched += [(window.shard, block) for block in blocks(window.offset, window.end)]
        met = [shared[window.cell] for window in windows if window.cell in shared]
        assert all(unit.window.offset <= window.offset and window.end <= unit.window.end
                   for window in windows if (unit := shared.get(window.cell)))  # fmt: skip
        assert [unit for unit in units if rank in unit.takers] == list(dict.fromkeys(met))
    assert len(fetched) == len(set(fetched))
    assert all(unit.fetcher in unit.takers and len(unit.takers) > 1 for unit in units)


def test_equal_needs_are_split_evenly() -> None:
    """Four ranks with equal needs fetch a quarter each."""
    windows = windows_of("__0_0.distcp", [ByteRange(0, 16 * CELL_BYTES)], CELL_BYTES)
    units = plan_shared_units(dict.fromkeys(range(4), windows), SHARDS)
    assert [unit.fetcher for unit in units] == [0, 1, 2, 3] * 4
    assert {unit.takers for unit in units} == {(0, 1, 2, 3)}


def test_needs_that_do_not_meet_are_not_shared() -> None:
    """Ranks that need different blocks of one cell fetch their own."""
    first, second = Window("__0_0.distcp", 0, 1000), Window("__0_0.distcp", 3 * BLOCK_BYTES, 1000)
    assert plan_shared_units({0: [first], 1: [second]}, SHARDS) == ()
