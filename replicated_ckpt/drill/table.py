"""The drill's output as a table and as JSON. Pure: reports in, text out."""

from collections.abc import Mapping, Sequence
from typing import Any

from replicated_ckpt.drill.plan import DrillPlan, Promise, Scenario
from replicated_ckpt.drill.verdict import LOSS_TOLERANCE, ScenarioReport
from replicated_ckpt.wording import align

HEADER = (
    "scenario",
    "ranks",
    "shards lost",
    "own store",
    "peers",
    "objects",
    "save s",
    "detect s",
    "restore s",
    "tensors",
    "verdict",
)
MEANING_BY_PROMISE = {
    Promise.SAME_BITS: "every tensor is as saved, and the run ends with the same bits as an uninterrupted one",
    Promise.SAME_LOSS: f"every tensor is as saved, and losses are within {LOSS_TOLERANCE:g} of an uninterrupted run",
    Promise.SHARD_LOST: "every rank got ShardLost with the names of the shards, and nothing hung",
}


def render(
    reports: Sequence[ScenarioReport], notes: Sequence[str], *, skipped: Mapping[Scenario, str] | None = None
) -> str:
    """The output: the table, the problems, the reasons for skipped scenarios, the promises' meanings, and the notes."""
    skipped = skipped or {}
    empty = ("-",) * len(HEADER[1:-1])
    rows = [HEADER, *(_row(report) for report in reports), *((scenario, *empty, "SKIPPED") for scenario in skipped)]
    rows.insert(1, tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True)))
    table = align(rows, left=(0, len(HEADER) - 1))
    problems = [f"{report.scenario}: {problem}" for report in reports for problem in report.problems]
    problems += [f"{scenario}: SKIPPED, {reason}." for scenario, reason in skipped.items()]
    promises = dict.fromkeys(report.promise for report in reports)
    meanings = [f"{promise}: {MEANING_BY_PROMISE[Promise(promise)]}." for promise in promises]
    blocks = [[table], problems, [*meanings, *_uploads(reports), *notes]]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(
    plan: DrillPlan,
    reports: Sequence[ScenarioReport],
    *,
    data: str | None,
    seconds: float,
    object_store: str | None = None,
) -> dict[str, Any]:
    """The content of `render` as one JSON value."""
    options = plan.options
    return {
        "held": bool(reports) and all(report.held for report in reports),
        "seconds": round(seconds, 3),
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "copies": options.copies,
        "model_size": options.model_size,
        "steps": options.steps,
        "data": data,
        "object_store": object_store,
        "loss_tolerance": LOSS_TOLERANCE,
        "scenarios": [report.as_json() for report in reports],
        "skipped": dict(plan.skipped),
    }


def _uploads(reports: Sequence[ScenarioReport]) -> list[str]:
    """A line for each scenario that held although all its nodes died: its columns do not show the wait for the bucket."""
    return [
        f"{report.scenario}: wait() took {report.wait_s:.2f} s after the last step. Then only the object store was left."
        for report in reports
        if report.wait_s is not None and report.held
    ]


def size(size_bytes: int) -> str:
    """A number of bytes, short enough for a column."""
    value = float(size_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _row(report: ScenarioReport) -> tuple[str, ...]:
    return (
        report.scenario,
        f"{report.ranks_before} → {report.ranks_after}",
        f"{report.shards_lost} of {report.shards}",
        size(report.bytes_local),
        size(report.bytes_peer),
        size(report.bytes_object),
        _seconds(report.save_s),
        _seconds(report.detect_s),
        _seconds(report.restore_s),
        str(report.tensors_verified),
        f"{'held' if report.held else 'FAILED'}: {report.promise}",
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
