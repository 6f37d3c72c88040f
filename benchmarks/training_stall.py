"""The suite of training with saves: how long each save blocks training, and how long steps take meanwhile.

A loop computes, changes the state in place and saves it every few steps. The cases are no saves; stock's and ours, each
synchronous and in the background; and ours as CheckpointManager saves with `keep_last=1`. `done s` is the time until the
save is acknowledged. A lap is another thread's sleep of one millisecond, which takes longer while the interpreter is held.
"""

import statistics
from typing import Any

from benchmarks.options import Options
from benchmarks.rank import stalling
from benchmarks.suites.results import Row
from benchmarks.suites.saving import Case
from benchmarks.suites.setup import Setup, cluster_on
from tests.harness.cluster import call

SHARE = 0.1  # share of the time of all suites
ALONE, STOCK = "no saves", "stock, async_save"
CASES: tuple[Case, ...] = (
    {"name": ALONE, "way": "none", "options": {}},
    {"name": "stock, save", "way": "stock sync", "options": {}},
    {"name": STOCK, "way": "stock async", "options": {}},
    {"name": "stock, async_save with DefaultStager", "way": "stock staged", "options": {}},
    {"name": "stock, the same in shared memory", "way": "stock shared", "options": {}},
    {"name": "ours, 2 copies, save", "way": "ours sync", "options": {"copies": 2}},
    {"name": "ours, 1 copy, async_save", "way": "ours async", "options": {"copies": 1}},
    {"name": "ours, 2 copies, async_save", "way": "ours async", "options": {"copies": 2}},
    {"name": "ours, 2 copies, as CheckpointManager", "way": "ours as managed", "options": {"copies": 2}},
    {"name": "ours, 2 copies, async_save, ack=local", "way": "ours async", "options": {"copies": 2, "ack": "local"}},
)
ON_GPU: tuple[Case, ...] = (
    {"name": "stock, the same in pinned memory", "way": "stock pinned", "options": {}},
    {"name": "stock, the same, overlapped", "way": "stock overlapped", "options": {}},
    {"name": "ours, 2 copies, async_save, overlapped", "way": "ours async", "options": {"copies": 2, "overlap": True}},
)
"""Further cases with a GPU."""
_SIZE_BYTES_MAX = {"cpu": 512 << 20, "cuda": 4 << 30}
_SAVES, _EVERY = 3, 20
_GRACE_S = 600.0


def stall_suite(options: Options) -> list[Row]:
    size_bytes = min(options.size_bytes, _SIZE_BYTES_MAX[options.device])
    rows: list[Row] = []
    for medium in options.media:
        rows += _rows(options, Setup(medium, 2, 1), size_bytes, options.seconds * SHARE / len(options.media))
    return rows


def _rows(options: Options, setup: Setup, size_bytes: int, seconds: float) -> list[Row]:
    saves, every = (1, 3) if options.is_quick else (_SAVES, _EVERY)
    on_gpu = options.device == "cuda"
    cases = [*CASES, *ON_GPU] if on_gpu else list(CASES)
    step = call(
        stalling.train,
        kind="fsdp2 on cuda" if on_gpu else "fsdp2",
        size_bytes=size_bytes,
        cases=cases,
        rounds=options.rounds,
        saves=saves,
        every=every,
        deadline_s=seconds,
    )
    with cluster_on(options, setup, 2 * (saves + 1) * size_bytes) as cluster:
        results = cluster.run(step, nodes=range(setup.nodes), ranks=setup.ranks, timeout_s=options.seconds + _GRACE_S)
    taken = results[0]
    assert taken is not None
    copy_s = statistics.median(sample["seconds"] for sample in taken["copy"]["copy"])
    names = [case["name"] for case in cases]
    return [
        *_of(setup, "block", taken, names, STOCK, copy_s),
        *_of(setup, "p50", taken, names, ALONE, None),
        *_of(setup, "p99", taken, names, ALONE, None),
        *_of(setup, "lap", taken, names, ALONE, None),
        Row("stall", setup.name, "probe", "copy", STOCK, taken["state_bytes"], taken["copy"]["copy"]),
    ]


def _of(
    setup: Setup, work: Any, taken: dict[str, Any], names: list[str], base: str, limit_s: float | None
) -> list[Row]:
    return [
        Row("stall", setup.name, work, name, base, taken["state_bytes"], taken[work][name], limit_s)
        for name in names
        if work != "block" or name != ALONE
    ]
