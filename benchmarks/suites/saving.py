"""Suites that save and load in one process: a large state, many small tensors, and repeated saves of both."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.options import Options
from benchmarks.rank import rounds as rounds_steps
from benchmarks.suites.limits import limits_of
from benchmarks.suites.results import Row, Work
from benchmarks.suites.setup import Setup, cluster_on, setups
from tests.harness.cluster import Cluster, call

STOCK = "stock FileSystemWriter"
SHARE_OF_SAVE, SHARE_OF_SMALL, SHARE_OF_REPEAT = 0.24, 0.07, 0.15  # share of the time of all suites
SMALL_ITEM_BYTES = 4 << 10
_GRACE_S = 600.0
_SAVES_BEFORE = 2
_GENERATIONS = 2
_REPEATED_COPIES = (1, 2)
_STATES = 2
Case = Mapping[str, Any]


def stock_case(name: str = STOCK) -> Case:
    return {"name": name, "way": "stock", "options": {}, "copies": 1}


def our_case(copies: int, ack: str = "peer") -> Case:
    name = (
        f"ours, 1 copy{'' if ack == 'peer' else f', ack={ack}'}" if copies == 1 else f"ours, {copies} copies, ack={ack}"
    )
    return {"name": name, "way": "ours", "options": {"copies": copies, "ack": ack}, "copies": copies}


def kept_case(copies: int) -> Case:
    """As CheckpointManager saves: plans are cached from one save to the next."""
    case = our_case(copies)
    return {**case, "name": f"{case['name']}, plans kept", "way": "ours with plans kept"}


def cases_of(setup: Setup) -> list[Case]:
    """Stock, and ours with each possible number of copies, and with two copies at each level of acknowledgement."""
    cases = [stock_case(), our_case(1), kept_case(1)]
    if setup.nodes > 1:
        cases += [*(our_case(2, ack) for ack in ("local", "peer-memory", "peer")), kept_case(2)]
    if setup.nodes > 2:
        cases.append(our_case(3))
    return cases


def save_suite(options: Options) -> list[Row]:
    rows: list[Row] = []
    for setup in setups(options):
        seconds = options.seconds * SHARE_OF_SAVE / len(setups(options))
        rows += saved_and_loaded("save", options, setup, "fsdp2", options.size_bytes, cases_of(setup), seconds)
    return rows


def small_suite(options: Options) -> list[Row]:
    rows: list[Row] = []
    for setup in setups(options):
        seconds = options.seconds * SHARE_OF_SMALL / len(setups(options))
        size_bytes = options.items * SMALL_ITEM_BYTES
        cases = [stock_case(), our_case(1), kept_case(1), our_case(2), kept_case(2)]
        rows += saved_and_loaded("small", options, setup, "small", size_bytes, cases, seconds)
    return rows


def repeat_suite(options: Options) -> list[Row]:
    """The third and later saves of a job with `keep_last=1`. With `--quick` only with two copies.

    Each number of copies has its own world, because a job's retention would remove the checkpoints of other jobs. Stock
    takes turns with it.
    """
    rows: list[Row] = []
    for medium in options.media:
        setup = Setup(medium, 2, 2)
        rows += _repeated(options, setup, "repeat", "fsdp2", options.size_bytes)
        rows += _repeated(options, setup, "repeat small", "small", options.items * SMALL_ITEM_BYTES)
    return rows


def _repeated(options: Options, setup: Setup, suite: str, kind: str, size_bytes: int) -> list[Row]:
    rows: list[Row] = []
    wanted = _REPEATED_COPIES[-1:] if options.is_quick else _REPEATED_COPIES
    seconds = options.seconds * SHARE_OF_REPEAT / (len(options.media) * _STATES * len(wanted))
    for copies in wanted:
        cases = [stock_case(f"stock, compared with {_count_of(copies)}"), keeping_case(copies)]
        with cluster_on(options, setup, (1 + copies * _GENERATIONS) * size_bytes) as cluster:
            rows += rows_in(
                cluster,
                suite,
                setup,
                kind,
                size_bytes,
                cases,
                seconds,
                rounds=options.rounds,
                rounds_before=_SAVES_BEFORE,
            )
    return rows


def _count_of(copies: int) -> str:
    return "1 copy" if copies == 1 else f"{copies} copies"


def keeping_case(copies: int) -> Case:
    options = {"copies": copies, "ack": "peer"}
    return {"name": f"ours, {_count_of(copies)}", "way": "ours that keeps one", "options": options, "copies": copies}


def saved_and_loaded(
    suite: str,
    options: Options,
    setup: Setup,
    kind: str,
    size_bytes: int,
    cases: Sequence[Case],
    seconds: float,
    *,
    x: float | None = None,
) -> list[Row]:
    """Rows for every case's saves and loads in one world, and for the probes of the machine."""
    with cluster_on(options, setup, size_bytes * max(case["copies"] for case in cases)) as cluster:
        return rows_in(cluster, suite, setup, kind, size_bytes, cases, seconds, rounds=options.rounds, x=x)


def rows_in(
    cluster: Cluster,
    suite: str,
    setup: Setup,
    kind: str,
    size_bytes: int,
    cases: Sequence[Case],
    seconds: float,
    *,
    rounds: int,
    x: float | None = None,
    rounds_before: int = 0,
) -> list[Row]:
    step = call(
        rounds_steps.save_and_load,
        kind=kind,
        size_bytes=size_bytes,
        cases=list(cases),
        rounds=rounds,
        is_disk=setup.is_disk,
        is_probed=True,
        deadline_s=seconds,
        rounds_before=rounds_before,
    )
    nodes = range(setup.nodes)
    results = cluster.run(step, nodes=nodes, ranks=setup.ranks, timeout_s=seconds + _GRACE_S)
    taken = results[0]
    assert taken is not None
    limits, base = limits_of(taken["probe"]), next((case["name"] for case in cases if case["way"] == "stock"), STOCK)
    rows: list[Row] = []
    works: tuple[Work, Work] = ("save", "load")
    for case in cases:
        for work, limit_s in zip(works, (limits.save_s(case["copies"]), limits.load_s()), strict=True):
            samples = taken[work][case["name"]]
            rows.append(Row(suite, setup.name, work, case["name"], base, taken["state_bytes"], samples, limit_s, x))
    for name, samples in taken["probe"].items():
        rows.append(Row(suite, setup.name, "probe", name, base, taken["state_bytes"], samples, None, x))
    return rows
