"""Saves of replicated states of DDP and HSDP, with and without the comparison of the replicas."""

from benchmarks.options import Options
from benchmarks.suites.results import Row
from benchmarks.suites.saving import Case, kept_case, saved_and_loaded, stock_case
from benchmarks.suites.setup import setups

SHARE_OF_REPLICAS = 0.3  # share of the time of all suites
_KINDS = ("ddp", "hsdp")


def compared_case(within: int | str | None) -> Case:
    """As CheckpointManager saves with two copies. Every replica is compared once in `within` saves, in each, or never."""
    case = kept_case(2)
    comparison = (
        "not compared" if within is None else f"{within} compared" if within == "all" else f"compared within {within}"
    )
    return {
        **case,
        "name": f"ours, 2 copies, {comparison}",
        "options": {**case["options"], "compare_replicas": within},
    }


def replicas_suite(options: Options) -> list[Row]:
    rows: list[Row] = []
    here = [setup for setup in setups(options) if setup.nodes > 1]
    cases = [stock_case(), *map(compared_case, (None, 16, "all"))]
    for kind in _KINDS:
        for setup in here:
            seconds = options.seconds * SHARE_OF_REPLICAS / (len(here) * len(_KINDS))
            rows += saved_and_loaded(f"replicas {kind}", options, setup, kind, options.size_bytes, cases, seconds)
    return rows
