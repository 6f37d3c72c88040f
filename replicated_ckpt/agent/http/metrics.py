"""What an agent counts, as Prometheus reads it. Source: the text exposition format, version 0.0.4."""

from collections.abc import Iterator, Mapping
from typing import Any

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus 3 takes no answer that says it is of another type."""


def format_metrics(status: Mapping[str, Any]) -> bytes:
    """The agent's status as metrics: every number and truth value in it, named by its place."""
    lines = []
    for name, value in sorted(_numbers("replicated_ckpt", status)):
        lines += [f"# TYPE {name} gauge", f"{name} {value}"]
    pending = status["object_store"]["pending"].values()
    lines += ["# TYPE replicated_ckpt_uploads_pending gauge", f"replicated_ckpt_uploads_pending {len(pending)}"]
    failing = sum(1 for upload in pending if upload["error"])
    lines += ["# TYPE replicated_ckpt_uploads_failing gauge", f"replicated_ckpt_uploads_failing {failing}"]
    return ("\n".join(lines) + "\n").encode()


def _numbers(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in fields.items():
        if key == "pending":
            continue
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}_{key}", value)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}_{key}", float(value)
        elif isinstance(value, list):
            yield f"{prefix}_{key}", float(len(value))
