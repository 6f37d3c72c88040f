"""OpenTelemetry: spans of a save and a load with their phases, if the program has imported it. No dependency."""

import sys
from typing import Any

from replicated_ckpt.core.rank_report import RankReport
from replicated_ckpt.version import __version__

_SCOPE = "replicated_ckpt"


def record_spans(report: RankReport) -> None:
    """Records one rank's part as a span below the caller's, with a span for each phase. Its end was a moment ago.

    Without `opentelemetry.trace` in this process nothing happens; without a tracer provider its API drops the spans. Of the
    phases that go on at once only the seconds are known, an attribute: their spans begin with the end of `plan`.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    tracer = trace.get_tracer(_SCOPE, __version__)
    end_s = report.ended_unix_s
    begin_s = end_s - report.seconds
    name = f"{_SCOPE}.{report.kind}"
    span = tracer.start_span(name, start_time=_ns(begin_s), attributes=_attributes_of(report))
    if report.error:
        span.set_attribute("error.type", report.error)
        span.set_status(trace.StatusCode.ERROR)
    context = trace.set_span_in_context(span)
    for phase, seconds in report.phases.items():
        begins = {"plan": begin_s, "commit": end_s - seconds}
        at_s = begins.get(phase, begin_s + report.phases.get("plan", 0.0))
        spent = {f"{_SCOPE}.seconds": seconds}
        child = tracer.start_span(f"{name}.{phase}", context=context, start_time=_ns(at_s), attributes=spent)
        child.end(end_time=_ns(min(at_s + seconds, end_s)))
    span.end(end_time=_ns(end_s))


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)


def _attributes_of(report: RankReport) -> dict[str, str | int]:
    names = {"checkpoint_id": report.checkpoint_id, "save_id": report.save_id, "host": report.host}
    counts = {"rank": report.rank, "copies": report.copies, "divergences": report.divergences}
    sizes = {f"bytes_{name}": size for name, size in report.sizes.items()}
    found: dict[str, str | int] = {**names, **counts, **sizes, "bad_copies": report.bad_copies}
    return {f"{_SCOPE}.{name}": value for name, value in found.items()}
