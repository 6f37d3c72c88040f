"""The drill's last words, for people and for machines. Pure: reports in, text out."""

from collections.abc import Sequence
from typing import Any

from replicated_ckpt.drill.plan import DrillPlan, Promise
from replicated_ckpt.drill.verdict import LOSS_TOLERANCE, ScenarioReport

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
    Promise.SAME_BITS: "every tensor as saved; at the end the same bits as the run had that was never interrupted",
    Promise.SAME_LOSS: f"every tensor as saved; losses within {LOSS_TOLERANCE:g} (relative) of the run's own",
    Promise.SHARD_LOST: "every rank was told ShardLost and the names of the shards; nothing hung, nothing was made up",
}


def render(reports: Sequence[ScenarioReport], notes: Sequence[str]) -> str:
    """The table, the problems of what did not hold, and the notes, ready to print."""
    rows = [HEADER, *(_row(report) for report in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    problems = [f"{report.scenario}: {problem}" for report in reports for problem in report.problems]
    promises = dict.fromkeys(report.promise for report in reports)
    meanings = [f"{promise}: {MEANING_BY_PROMISE[Promise(promise)]}." for promise in promises]
    blocks = [lines, problems, [*meanings, *notes]]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(plan: DrillPlan, reports: Sequence[ScenarioReport], *, data: str | None, seconds: float) -> dict[str, Any]:
    """What `render` shows, as one JSON value."""
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
        "loss_tolerance": LOSS_TOLERANCE,
        "scenarios": [report.as_json() for report in reports],
    }


def size(size_bytes: int) -> str:
    """A byte count that fits into a column."""
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


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    cells = (
        cell.ljust(width) if column in (0, last) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
