"""The report of a rank's save or load: sent to its node's agent for metrics, kept in a file, and recorded as spans.

No other node gets a message.
"""

import logging
import socket
import sys
import time
from typing import Any

from replicated_ckpt.core.rank_report import Kind, RankReport
from replicated_ckpt.dcp.runtime.user_code import call_back
from replicated_ckpt.errors import StoreDenied, StoreError
from replicated_ckpt.node.state.rank_reports import RankReports
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.local_messages import connect, send_message
from replicated_ckpt.version import __version__
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

_WITHIN_S = 0.2
"""A local socket takes the message at once. An agent that was stopped long ago must not hold up training."""


def report_failed(store: LocalStore, kind: Kind, checkpoint_id: str, rank: int, seconds: float, error: object) -> None:
    """Reports that this rank's save or load failed, with the class of its error."""
    host, named = socket.gethostname(), type(error).__name__
    send_report(
        store, RankReport(kind, one_line(checkpoint_id, 500), "", rank, host, time.time(), seconds, error=named)
    )


def send_report(store: LocalStore, report: RankReport) -> None:
    """Sends one report without waiting for an answer, and records it as spans.

    The save or load has ended, so a lost report is only logged.
    """
    call_back(record_spans, report)  # a user's exporter may raise
    try:
        with connect(store.root_agent_directory(), _WITHIN_S) as connection:
            send_message(connection, {"report": report.without_picture.to_json()})
    # No agent runs, as after a save by a single process. Or the agent hangs, or belongs to another user.
    except (OSError, StoreDenied) as exc:
        log.debug("this node's agent did not get the report of a %s: %s", report.kind, exc)


def report_ended(store: LocalStore, report: RankReport) -> None:
    """Sends the report of a successful save or load, and keeps it in a file. A failure to keep it is only logged."""
    send_report(store, report)
    try:
        RankReports(store).keep(report)
    # The root is read-only, its disk is full, or a reader has no root.
    except StoreError as exc:
        log.debug("the report of a %s is not kept: %s", report.kind, exc)


_SCOPE = "replicated_ckpt"


def record_spans(report: RankReport) -> None:
    """Records one rank's part as an OpenTelemetry span below the caller's, with a child span for each phase.

    Does nothing unless the program has imported `opentelemetry.trace`. Without a tracer provider, OpenTelemetry drops the
    spans. The phases between `plan` and `commit` overlap. Only their durations are known, so all of them begin when `plan`
    ends.
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
