"""Suites that save and load again in one process: the large state, many small tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.options import Options
from benchmarks.suites.limits import limits_of
from benchmarks.suites.results import Row, Work
from benchmarks.suites.setup import Setup, cluster_on, setups
from tests.multiprocess.cluster import Cluster, call

STOCK = "stock FileSystemWriter"
SHARE_OF_SAVE, SHARE_OF_SMALL = 0.28, 0.08  # of the time for all suites
_SMALL_ITEM_BYTES = 4 << 10
_GRACE_S = 600.0
Case = Mapping[str, Any]


def stock_case() -> Case:
    return {"name": STOCK, "way": "stock", "options": {}, "copies": 1}


def our_case(copies: int, ack: str = "peer") -> Case:
    name = (
        f"ours, 1 copy{'' if ack == 'peer' else f', ack={ack}'}" if copies == 1 else f"ours, {copies} copies, ack={ack}"
    )
    return {"name": name, "way": "ours", "options": {"copies": copies, "ack": ack}, "copies": copies}


def kept_case(copies: int) -> Case:
    """As CheckpointManager saves: plans are kept from one save to the next."""
    case = our_case(copies)
    return {**case, "name": f"{case['name']}, plans kept", "way": "ours with plans kept"}


def cases_of(setup: Setup) -> list[Case]:
    """Stock, and ours with every number of copies that the nodes can hold, at every level of acknowledgement."""
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
        size_bytes = options.items * _SMALL_ITEM_BYTES
        cases = [stock_case(), our_case(1), kept_case(1), our_case(2), kept_case(2)]
        rows += saved_and_loaded("small", options, setup, "small", size_bytes, cases, seconds)
    return rows


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
    """Rows for saves and for loads by every case, in one world, and for the probes that say what the machine can do."""
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
) -> list[Row]:
    step = call(
        "benchmarks.rank.rounds.save_and_load",
        kind=kind,
        size_bytes=size_bytes,
        cases=list(cases),
        rounds=rounds,
        is_disk=setup.is_disk,
        is_probed=True,
        deadline_s=seconds,
    )
    nodes = range(setup.nodes)
    results = cluster.launch([step], nodes=nodes, ranks=setup.ranks, timeout_s=seconds + _GRACE_S)
    taken = results.values[0][0]
    limits = limits_of(taken["probe"])
    rows = []
    for case in cases:
        for work, limit_s in (("save", limits.save_s(case["copies"])), ("load", limits.load_s())):
            samples = taken[work][case["name"]]
            rows.append(_row(suite, setup, work, case["name"], taken["state_bytes"], samples, limit_s, x))
    for name, samples in taken["probe"].items():
        rows.append(_row(suite, setup, "probe", name, taken["state_bytes"], samples, None, x))
    return rows


def _row(
    suite: str,
    setup: Setup,
    work: Any,
    case: str,
    state_bytes: int,
    samples: Sequence[Mapping[str, float]],
    limit_s: float | None,
    x: float | None,
) -> Row:
    kind: Work = work
    return Row(suite, setup.name, kind, case, STOCK, state_bytes, samples, limit_s, x)
