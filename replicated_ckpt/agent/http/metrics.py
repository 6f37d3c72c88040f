"""The metrics of an agent: of its node, of its ranks' saves and loads, and, on request, of each known node."""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.rank_report import Kind
from replicated_ckpt.core.upkeep.overview import Look, Overview, make_overview
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.rank_reports import BOUNDS_S, FiguresRead, Histogram
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import LocalStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus 3 refuses an answer without this type."""
Labels = Mapping[str, str]
PREFIX = "replicated_ckpt_"


@dataclass(frozen=True)
class Family:
    """One metric. A sample is a suffix of the name (only histograms have one), its labels and its value."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    samples: Sequence[tuple[str, Labels, float]]


def gauge(name: str, help_: str, value: float) -> Family:
    return Family(name, "gauge", help_, [("", {}, value)])


def counter(name: str, help_: str, value: float) -> Family:
    return Family(name, "counter", help_, [("", {}, value)])


def make_family(
    kind: Literal["gauge", "counter"], name: str, help_: str, values: Iterable[tuple[Labels, float]]
) -> Family:
    return Family(name, kind, help_, [("", labels, value) for labels, value in values])


def histogram(name: str, help_: str, found: Iterable[tuple[Labels, Histogram]]) -> Family:
    samples: list[tuple[str, Labels, float]] = []
    for labels, each in found:
        *counts, total = accumulate(each.counts)
        buckets = zip((*map(str, BOUNDS_S), "+Inf"), (*counts, total), strict=True)
        samples += [("_bucket", {**labels, "le": bound}, count) for bound, count in buckets]
        samples += [("_sum", labels, each.sum_s), ("_count", labels, total)]
    return Family(name, "histogram", help_, samples)


def render(families: Iterable[Family]) -> bytes:
    """The families in the text format of Prometheus.

    Source: prometheus.io/docs/instrumenting/exposition_formats.
    """
    lines = []
    for family in families:
        name = PREFIX + family.name
        lines += [f"# HELP {name} {_escape(family.help)}", f"# TYPE {name} {family.kind}"]
        lines += [f"{name}{suffix}{_render(labels)} {value!r}" for suffix, labels, value in family.samples]
    return ("\n".join(lines) + "\n").encode()


def _render(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_quote(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _quote(value: str) -> str:
    return _escape(value).replace('"', r"\"")


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


_GAUGES: Mapping[str, tuple[str, str]] = {
    "uptime_seconds": ("uptime_s", "Time since this agent started."),
    "leaving": ("is_leaving", "1 while this agent completes its open saves before it exits."),
    "ranks_running": (
        "has_clients",
        "1 while a process of a job uses this agent: from its first save or load until it ends.",
    ),
    "threads": ("threads", "Threads of this agent."),
    "staged_saves": ("staged", "Saves that are open on this node."),
    "checkpoints": ("checkpoints", "Committed checkpoints on this node."),
    "in_doubt_saves": ("in_doubt", "Open saves that wait for nodes that do not answer."),
    "diverged_checkpoints": ("diverged", "Checkpoints on this node whose save found replicas that differ."),
    "duplicate_nodes": ("duplicate_nodes", "Nodes with two running agents."),
    "restoring": ("restoring", "1 while re-protection has work."),
    "repair_complete": ("protection.is_complete", "1 if the last round of re-protection found nothing to do."),
    "repair_planned": ("protection.planned", "Actions of all nodes that the last round of re-protection planned."),
    "repair_failing": ("protection.failed", "Actions of this node that failed in the last round of re-protection."),
    "retention_held_back": ("protection.retention.held_back", "Checkpoints that retention cannot remove yet."),
    "scrub_running": ("scrub.is_running", "1 while the scrub reads this node's disk."),
    "disk_free_bytes": ("room.free_bytes", "Free space of the file system of the root."),
    "disk_size_bytes": ("room.size_bytes", "Size of the file system of the root."),
    "disk_writable": ("room.is_writable", "1 if files can be written to the root."),
    "verify_read_bytes": ("verify.bytes_read", "Bytes that the running check has read, 0 if none runs."),
    "verify_size_bytes": ("verify.size_bytes", "Bytes that the running check has to read, 0 if none runs."),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "agent_starts_total": ("incarnation", "Starts of this node's agents."),
    "repair_rounds_total": ("protection.rounds", "Rounds of re-protection."),
    "repair_copied_bytes_total": ("protection.bytes_copied", "Bytes that re-protection has copied to this node."),
    "retention_removed_total": ("protection.retention.removed", "Checkpoints that retention has removed here."),
    "retention_slimmed_total": (
        "protection.retention.slimmed",
        "Checkpoints whose optimizer retention has removed here.",
    ),
    "scrub_passes_total": ("scrub.passes", "Passes of the scrub over all checkpoints of this node."),
    "scrub_read_bytes_total": ("scrub.bytes_read", "Bytes that the scrub has read."),
    "scrub_findings_total": ("scrub.findings", "Bad files that the scrub has found."),
    "upload_sent_bytes_total": ("object_store.bytes_sent", "Bytes that this node has sent to the bucket."),
}
"""By name: the place in the status, and the help. The value of a list is its length."""
_AGE = (
    "Time of the newest save by level: on this node, whole, with all copies, in the bucket. By its coordinator's clock."
)


def expose(service: NodeService, look: Look | None, status: Mapping[str, Any], *, is_cluster: bool) -> bytes:
    """The metrics as text. `look`: re-protection's last, None before the first. `is_cluster`: also those of known nodes."""
    families = [
        make_family("gauge", "agent_info", "This agent.", [({k: str(status[k]) for k in ("node_id", "version")}, 1)]),
        *(gauge(name, help_, _value_at(status, place)) for name, (place, help_) in _GAUGES.items()),
        *(counter(name, help_, _value_at(status, place)) for name, (place, help_) in _COUNTERS.items()),
        *_describe_uploads(status["object_store"]["pending"].values()),
        *_describe_store(
            service.holdings(), None if look is None else make_overview(look), _find_memory_bytes(service)
        ),
        *_describe_figures(service.figures.read()),
    ]
    if is_cluster and look is not None:
        host_by_node = {peer.node_id: peer.host for peer in service.peers.read_all()}
        families += _describe_nodes(look.views, {**host_by_node, service.node_id: socket.gethostname()})
    return render(families)


def _value_at(status: Mapping[str, Any], place: str) -> float:
    value: Any = status
    for part in place.split("."):
        value = value[part]
    if isinstance(value, bool):
        return int(value)
    return len(value) if isinstance(value, list | tuple) else value


def _describe_uploads(pending: Sequence[Mapping[str, Any]]) -> Iterator[Family]:
    failing = [upload["failing_s"] for upload in pending if upload["error"]]
    yield gauge("uploads_pending", "Checkpoints of this node that are not in the bucket yet.", len(pending))
    yield gauge("uploads_failing", "Uploads whose last try failed.", len(failing))
    yield gauge(
        "upload_failing_seconds", "Time since which an upload fails, 0 if none does.", max(failing, default=0.0)
    )


def _find_memory_bytes(service: NodeService) -> Mapping[str, int]:
    """The size of this node's memory tier, if a job has used one. The tier's own agent serves only the tier."""
    try:
        root = find_memory_tier(service.store)
        held = [] if root is None else LocalStore(root).catalog.holdings(service.node_id)
    except ReplicatedCkptError as exc:
        service.figures.count_error("request", exc)  # the other metrics are still exposed
        return {}
    return {} if root is None else {"memory": sum(sum(holding.sizes.values()) for holding in held)}


def _describe_store(
    holdings: Sequence[Holding], seen: Overview | None, memory_bytes: Mapping[str, int]
) -> Iterator[Family]:
    sizes = [sum(holding.sizes.values()) for holding in holdings]
    newest = max((holding.created_unix_s for holding in holdings), default=0.0)
    damaged = sum(len(holding.damaged) + (not holding.has_metadata) for holding in holdings)
    stored, times = {"node": sum(sizes), **memory_bytes}, {"node": newest}
    if seen is not None:
        stored["bucket"] = seen.uploaded_bytes
        times |= {"whole": seen.whole_unix_s, "copies": seen.protected_unix_s, "bucket": seen.uploaded_unix_s}
        yield gauge("copies_missing", "Copies of shards that are missing, on all nodes together.", seen.copies_missing)
        yield gauge("shards_lost", "Shards without an intact copy on any node.", seen.shards_lost)
    yield make_family(
        "gauge", "last_commit_timestamp_seconds", _AGE, _by("level", {k: v for k, v in times.items() if v})
    )
    yield make_family(
        "gauge",
        "stored_bytes",
        "Size of checkpoints by tier: on this node, in its memory tier, in the bucket (only those that a node also has).",
        _by("tier", stored),
    )
    yield gauge("largest_save_bytes", "Size of the largest checkpoint on this node.", max(sizes, default=0))
    yield gauge("damaged_files", "Files of this node that are known to be bad or missing.", damaged)


def _by(label: str, values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [({label: name}, value) for name, value in values.items()]


_ENDED: Mapping[Kind, tuple[str, str, str]] = {
    "save": ("saves_total", "Saves that ended, counted on the node of rank 0.", "written or linked"),
    "load": ("restores_total", "Loads that ended, counted on the node of rank 0.", "by their source"),
}


def _describe_figures(found: FiguresRead) -> Iterator[Family]:
    for kind, (name, ended, by) in _ENDED.items():
        phases = [({"phase": phase}, each) for (of, phase), each in found.phases.items() if of == kind]
        sizes = [({"kind": one}, size) for (of, one), size in found.sizes.items() if of == kind]
        yield counter(name, ended, found.ended[kind])
        yield histogram(
            f"{kind}_duration_seconds", f"Time of a {kind} on each rank of this node.", [({}, found.durations[kind])]
        )
        yield histogram(f"{kind}_phase_duration_seconds", f"The same by phase of the {kind}; phases overlap.", phases)
        yield make_family("counter", f"{kind}_bytes_total", f"Bytes of this node's ranks in {kind}s, {by}.", sizes)
    yield counter("divergences_total", "Values that saves found to differ between ranks.", found.divergences)
    yield counter("bad_copies_total", "Bad copies that loads of this node's ranks met.", found.bad_copies)
    errors = [({"origin": origin, "class": name}, count) for (origin, name), count in found.errors.items()]
    yield make_family("counter", "errors_total", "Errors by class, and by what failed.", errors)


def _describe_nodes(views: Sequence[NodeView], host_by_node: Mapping[str, str]) -> Iterator[Family]:
    """The metrics of each node at re-protection's last look. Of a silent node, its last known holdings."""

    def each(name: str, help_: str, values: Sequence[float | None]) -> Family:
        labels = [{"node": view.node_id, "host": host_by_node.get(view.node_id, "")} for view in views]
        known = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
        return make_family("gauge", f"node_{name}", help_, known)

    held = [view.holdings or () for view in views]
    sizes = [[sum(holding.sizes.values()) for holding in holdings] for holdings in held]
    yield each("up", "1 if the node answered the last look.", [int(view.presence is Presence.UP) for view in views])
    yield each("checkpoints", "Checkpoints on the node.", list(map(len, held)))
    yield each("stored_bytes", "Size of the node's checkpoints.", list(map(sum, sizes)))
    yield each("largest_save_bytes", "Size of the node's largest checkpoint.", [max(one, default=0) for one in sizes])
    yield each(
        "writable_bytes", "Bytes that can be written to the node's root.", [view.writable_bytes for view in views]
    )
    damaged = [sum(len(holding.damaged) for holding in holdings) for holdings in held]
    yield each("damaged_files", "Files of the node that are known to be bad.", damaged)
    newest = [max((holding.created_unix_s for holding in holdings), default=None) for holdings in held]
    yield each("last_commit_timestamp_seconds", "Time of the newest save on the node.", newest)
    reports = [view.node_report for view in views]
    yield each("uploads_pending", "The node's checkpoints not in the bucket.", [len(one.uploading) for one in reports])
    yield each("uploads_unable", "Uploads that the node cannot do.", [len(one.unable) for one in reports])
