"""The suite of growth, on tmpfs: how save and load times depend on size, ranks, items and copies."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.options import Options
from benchmarks.suites.results import Row
from benchmarks.suites.saving import STOCK, Case, our_case, saved_and_loaded, stock_case
from benchmarks.suites.setup import Setup

SHARE = 0.15  # share of the time of all suites
SIZES = (1, 4, 16)
RANKS = ((1, 1), (2, 1), (2, 2), (2, 4))  # nodes, and ranks per node
ITEMS = (100, 1_000, 10_000, 100_000)
COPIES = (1, 2, 3)
_ITEM_BYTES = 4 << 10
_POINTS = len(SIZES) + len(RANKS) + len(ITEMS) + 1
_ROUNDS_MAX = 3


def growth_suite(options: Options) -> list[Row]:
    few = replace(options, rounds=min(options.rounds, _ROUNDS_MAX))
    return [*_by_size(few), *_by_ranks(few), *_by_items(few), *_by_copies(few)]


def _by_size(options: Options) -> list[Row]:
    rows, cases = [], [stock_case(), our_case(1), our_case(2)]
    for factor in SIZES[:2] if options.is_quick else SIZES:
        size_bytes = options.size_bytes * factor // SIZES[-1]
        rows += _point("size, MB", size_bytes / 1e6, options, (2, 2), "fsdp2", size_bytes, cases)
    return rows


def _by_ranks(options: Options) -> list[Row]:
    rows = []
    for shape in RANKS[:1] if options.is_quick else RANKS:
        cases = [stock_case(), our_case(1), *([our_case(2)] if shape[0] > 1 else [])]
        rows += _point("ranks", shape[0] * shape[1], options, shape, "fsdp2", options.size_bytes // 4, cases)
    return rows


def _by_items(options: Options) -> list[Row]:
    rows, cases = [], [stock_case(), our_case(1), our_case(2)]
    for count in ITEMS[:1] if options.is_quick else ITEMS:
        once = replace(options, rounds=1) if count == ITEMS[-1] else options
        rows += _point("items of 4 KB", count, once, (2, 2), "small", count * _ITEM_BYTES, cases)
    return rows


def _by_copies(options: Options) -> list[Row]:
    """Stock's one copy is the base of every number of copies."""
    cases = [stock_case(), *(our_case(copies) for copies in COPIES)]
    taken = _point("copies", 0, options, (COPIES[-1], 1), "fsdp2", options.size_bytes // 4, cases)
    by_name = {our_case(copies)["name"]: copies for copies in COPIES}
    rows = [replace(row, x=by_name[row.case], case="ours") for row in taken if row.case in by_name]
    return rows + [replace(row, x=copies) for row in taken if row.case == STOCK for copies in COPIES]


def _point(
    axis: str, x: float, options: Options, shape: tuple[int, int], kind: str, size_bytes: int, cases: Sequence[Case]
) -> list[Row]:
    setup = Setup("tmpfs", *shape)
    seconds = options.seconds * SHARE / _POINTS
    rows = saved_and_loaded("growth", options, setup, kind, size_bytes, cases, seconds, x=x)
    return [replace(row, setup=axis) for row in rows if row.work != "probe"]
