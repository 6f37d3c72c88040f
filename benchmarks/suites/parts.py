"""Saves in parts: a file for the weights and one for the optimizer, or one for both; and linked unchanged entries."""

from benchmarks.options import Options
from benchmarks.suites.results import Row
from benchmarks.suites.saving import (
    SMALL_ITEM_BYTES,
    Case,
    keeping_case,
    kept_case,
    rows_in,
    saved_and_loaded,
    stock_case,
)
from benchmarks.suites.setup import cluster_on, setups

SHARE_OF_PARTS = 0.2  # share of the time of all suites
_SAVES_BEFORE = 3
"""The fourth save is the first that links."""
_CHECKPOINTS = 5  # one of stock's, and two with two copies each


def one_file_case() -> Case:
    return {**kept_case(2), "name": "ours, 2 copies, one file", "way": "ours in one file"}


def frozen_case(*, is_linked: bool) -> Case:
    """A job that keeps its newest checkpoint, whose files the next save may link."""
    case = keeping_case(2)
    options = {**case["options"], "link_unchanged": is_linked}
    return {**case, "name": f"ours, 2 copies, {'linked' if is_linked else 'written anew'}", "options": options}


def parts_suite(options: Options) -> list[Row]:
    rows: list[Row] = []
    here = [setup for setup in setups(options) if setup.nodes > 1]
    cases = [stock_case(), one_file_case(), {**kept_case(2), "name": "ours, 2 copies, in parts"}]
    sizes = {"fsdp2": options.size_bytes, "small adamw": options.items * SMALL_ITEM_BYTES}
    seconds = options.seconds * SHARE_OF_PARTS / (len(here) * (len(sizes) + 1))
    for setup in here:
        for kind, size_bytes in sizes.items():
            rows += saved_and_loaded(f"parts {kind}", options, setup, kind, size_bytes, cases, seconds)
        # Each case has its own world, because a job's retention removes the checkpoints of others.
        for is_linked in (False, True):
            kept = [stock_case(), frozen_case(is_linked=is_linked)]
            with cluster_on(options, setup, _CHECKPOINTS * options.size_bytes) as cluster:
                rows += rows_in(
                    cluster,
                    "parts frozen",
                    setup,
                    "frozen",
                    options.size_bytes,
                    kept,
                    seconds / 2,
                    rounds=options.rounds,
                    rounds_before=_SAVES_BEFORE,
                )
    return rows
