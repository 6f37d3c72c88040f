"""Saves in parts, a file for the weights and one for the optimizer, in turn with saves of one file for each rank."""

from benchmarks.options import Options
from benchmarks.suites.results import Row
from benchmarks.suites.saving import SMALL_ITEM_BYTES, Case, kept_case, saved_and_loaded, stock_case
from benchmarks.suites.setup import setups

SHARE_OF_PARTS = 0.2  # of the time for all suites


def one_file_case() -> Case:
    return {**kept_case(2), "name": "ours, 2 copies, one file", "way": "ours in one file"}


def parts_suite(options: Options) -> list[Row]:
    rows: list[Row] = []
    here = [setup for setup in setups(options) if setup.nodes > 1]
    cases = [stock_case(), one_file_case(), {**kept_case(2), "name": "ours, 2 copies, in parts"}]
    sizes = {"fsdp2": options.size_bytes, "small adamw": options.items * SMALL_ITEM_BYTES}
    for kind, size_bytes in sizes.items():
        for setup in here:
            seconds = options.seconds * SHARE_OF_PARTS / (len(here) * len(sizes))
            rows += saved_and_loaded(f"parts {kind}", options, setup, kind, size_bytes, cases, seconds)
    return rows
