"""A rank's report goes to its own node's agent, for metrics, and into a file of the node. No other node gets a message."""

import logging
import socket
import time

from replicated_ckpt.core.rank_report import Kind, RankReport
from replicated_ckpt.dcp.runtime.failures import call_back
from replicated_ckpt.dcp.runtime.tracing import record_spans
from replicated_ckpt.errors import StoreDenied, StoreError
from replicated_ckpt.node.state.rank_reports import RankReports
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.local_messages import connect, send_message
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

_WITHIN_S = 0.2
"""A local socket takes the message at once. An agent that was stopped long ago must not hold up training."""


def report_failed(store: LocalStore, kind: Kind, checkpoint_id: str, rank: int, seconds: float, error: object) -> None:
    """Sends the class of the error with which this rank's save or load has failed."""
    host, named = socket.gethostname(), type(error).__name__
    send_report(
        store, RankReport(kind, one_line(checkpoint_id, 500), "", rank, host, time.time(), seconds, error=named)
    )


def send_report(store: LocalStore, report: RankReport) -> None:
    """Sends one report, and waits for no answer. The save or load has ended: a report that is lost is only logged.

    It also becomes spans, where this process has a tracer.
    """
    call_back(record_spans, report)  # a user's exporter may raise
    try:
        with connect(store.root_agent_directory(), _WITHIN_S) as connection:
            send_message(connection, {"report": report.without_picture.to_json()})
    # No agent runs, as after a save of one process alone; or it hangs, or is another user's.
    except (OSError, StoreDenied) as exc:
        log.debug("this node's agent did not get the report of a %s: %s", report.kind, exc)


def report_ended(store: LocalStore, report: RankReport) -> None:
    """Sends the report of a save or load that has succeeded, and keeps it. One that cannot be kept is only logged."""
    send_report(store, report)
    try:
        RankReports(store).keep(report)
    # The root is read-only, its disk is full, or a reader has no root.
    except StoreError as exc:
        log.debug("the report of a %s is not kept: %s", report.kind, exc)
