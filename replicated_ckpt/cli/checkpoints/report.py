"""`replicated-ckpt report ID`: how long each rank and agent took to save and load one checkpoint, and which was slowest."""

import argparse
import json
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import find_id
from replicated_ckpt.cli.look.given_nodes import add_nodes_argument, open_book
from replicated_ckpt.cli.look.given_root import add_root_argument, add_start_argument, open_store_of
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import format_moment
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.rank_report import Kind, RankReport
from replicated_ckpt.core.timing import find_slowest, make_trace
from replicated_ckpt.errors import CheckpointNotFound
from replicated_ckpt.node.state.rank_reports import RankReports
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import align, describe_bytes, plural

HELP = "Show how long each rank and agent took to save and load one checkpoint, and which one was the slowest."
_KINDS: tuple[Kind, ...] = ("save", "load")
_PHASES = {"save": ("plan", "serialise", "write", "send", "fsync", "commit"), "load": ("plan", "read")}
_SIZES = {"save": ("written", "linked"), "load": ("local", "peer", "object", "shared")}
_LEAST_S = 0.0005
_KEPT = (
    "Each node keeps the reports of its last 16 saves and 16 loads. If they are on another node, run the command there, or "
    "with that node's agent running."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint, or latest; also one that was removed since")
    add_root_argument(parser, required=False)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also write a Chrome trace of the newest save and load, for https://ui.perfetto.dev. Ranks are aligned at "
        "the end of planning, because the nodes' clocks differ. The load is drawn right after the save",
    )
    add_nodes_argument(parser)
    add_start_argument(parser)
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the report of each rank was found; UNREACHABLE if some are missing and nodes did not answer."""
    store = open_store_of(arguments)
    seen = look_at_nodes(store, open_book(store, arguments.nodes))
    checkpoint_id = find_id(store, arguments.id, seen)
    found, seen = look_at_reports(store, seen, checkpoint_id)
    newest = {kind: choose_newest(found, kind) for kind in _KINDS}
    if not any(newest.values()):
        unreached = seen.describe_unreached()
        where = f" Not reached: {'; '.join(unreached)}." if unreached else ""
        message = f"No node that was reached has a report of a save or load of {checkpoint_id!r}.{where}"
        raise CheckpointNotFound(message, _KEPT, unreached)
    names = _name_nodes(found, seen)
    if arguments.trace is not None:
        trace = make_trace([reports for reports in newest.values() if reports], names)
        with translate_errors(str(arguments.trace.parent), "write", arguments.trace.name):
            write_file(arguments.trace, json.dumps(trace).encode())
    missing = {kind: _find_missing(newest[kind], seen) for kind in _KINDS}
    if arguments.json:
        told = {kind: _as_json(reports, missing[kind]) for kind, reports in newest.items() if reports}
        print(json.dumps({"checkpoint_id": checkpoint_id, **told}, indent=2))
    else:
        for kind, reports in newest.items():
            print("\n".join(_describe(kind, reports, missing[kind], names)))
        print("\n".join(seen.describe_unreached()), end="\n" if seen.unreached else "")
        if arguments.trace is not None:
            print(f"trace written to {arguments.trace}: open it in https://ui.perfetto.dev")
    return ExitCode.UNREACHABLE if seen.unreached and any(missing.values()) else ExitCode.OK


def look_at_reports(store: LocalStore, seen: NodesSeen, checkpoint_id: str) -> tuple[Sequence[RankReport], NodesSeen]:
    """The reports of a checkpoint from this node and from the others in `seen` that answered.

    Also returns `seen` without the nodes that no longer answer.

    Raises:
        StoreError: this node's reports cannot be read.
    """

    def ask(node: str) -> Sequence[RankReport]:
        address = seen.addresses[node]
        with AgentClient(address) as client:
            answer = client.call("GET", f"/v1/reports?{urllib.parse.urlencode({'checkpoint_id': checkpoint_id})}")
        with parsing(f"{address.label} sent an invalid report of a rank"):
            return [RankReport.from_json(each) for each in answer["reports"]]

    others = FanOut.run([address.node_id for address in seen.reached], ask)
    found = [*RankReports(store).read(checkpoint_id), *(report for told in others.results.values() for report in told)]
    # A node that stopped answering, or whose release has no reports, only lacks its own.
    still = replace(seen, unreached={**seen.unreached, **others.errors})
    return [report for report in found if report.checkpoint_id == checkpoint_id], still


def choose_newest(reports: Iterable[RankReport], kind: Kind) -> Sequence[RankReport]:
    """The reports of the newest save or load, one for each known rank, in order of rank. Empty: there is none.

    A rank's own report is used if it was found, else the shorter one that rank 0 has of the rank.
    """
    by_operation: dict[str, dict[int, RankReport]] = {}
    ended: Mapping[str, float] = {}
    for report in (one for one in reports if one.kind == kind):
        by_rank = by_operation.setdefault(report.operation, {})
        ended = {**ended, report.operation: max(ended.get(report.operation, 0.0), report.ended_unix_s)}
        by_rank[report.rank] = report
        for other in report.ranks:
            if other.rank not in by_rank:
                by_rank[other.rank] = other
    if not ended:
        return ()
    newest = by_operation[max(ended, key=ended.__getitem__)]
    return [newest[rank] for rank in sorted(newest)]


def _name_nodes(found: Sequence[RankReport], seen: NodesSeen) -> Mapping[str, str]:
    """The name of each node: as in other commands, else the host that its ranks named."""
    hosts = {one.node_id: one.host for report in found for one in (report, *report.ranks)}
    return {**hosts, **seen.names}


def _find_missing(reports: Sequence[RankReport], seen: NodesSeen) -> Sequence[int]:
    """The ranks of a save without a report. Those of a load are known only if rank 0's report was found."""
    if not reports or reports[0].kind == "load" or reports[0].save_id not in seen.manifests:
        return ()
    world_size = seen.manifests[reports[0].save_id].world_size
    return sorted(set(range(world_size)) - {one.rank for one in reports})


def _as_json(reports: Sequence[RankReport], missing: Sequence[int]) -> dict[str, Any]:
    slowest = find_slowest(reports)
    ranks = [{**one.to_json(), "ranks": []} for one in reports]
    return {"slowest": None if slowest is None else asdict(slowest), "ranks": ranks, "missing": list(missing)}


def _describe(
    kind: Kind, reports: Sequence[RankReport], missing: Sequence[int], names: Mapping[str, str]
) -> Sequence[str]:
    if not reports:
        return [f"no report of a {kind} was found"]
    first, slowest = reports[0], find_slowest(reports)
    nodes = len({one.node_id for one in reports})
    header = f"{kind} of {first.checkpoint_id} (save {first.save_id[:8]}), ended {format_moment(first.ended_unix_s)}"
    lines = [f"{header}: {plural(len(reports), 'rank')} on {plural(nodes, 'node')}", _make_table(reports, names)]
    if slowest is not None:
        lines.append(slowest.describe(names))
    elif len(reports) > 1:
        lines.append("no rank or node stands out: none is 1.5 times as slow as the median of the others")
    if missing:
        lines.append(f"no report was found of {plural(len(missing), 'rank')}: {', '.join(map(str, missing))}")
    return lines


def _make_table(reports: Sequence[RankReport], names: Mapping[str, str]) -> str:
    """A row for each rank, with its own work, and for each agent that wrote shards of ranks."""
    kind = reports[0].kind
    phases, sizes = _PHASES[kind], _SIZES[kind]
    rows = [["", "node", *sizes, *phases, "seconds"]]
    for one in reports:
        agents = _add_agent_spans([one])
        spent = {name: value - agents.get(name, 0.0) for name, value in one.phases.items()}
        counts = [describe_bytes(one.sizes.get(name, 0)) for name in sizes]
        # The agent's work is in the agent's own row.
        done = {name for name, value in spent.items() if name not in agents or value > _LEAST_S}
        cells = [f"{spent[name]:.3f}" if name in done else "-" for name in phases]
        rows.append([f"rank {one.rank}", names[one.node_id], *counts, *cells, f"{one.seconds:.3f}"])
    for node in dict.fromkeys(one.node_id for one in reports):
        agents = _add_agent_spans([one for one in reports if one.node_id == node])
        if agents:
            cells = [f"{agents[name]:.3f}" if name in agents else "-" for name in phases]
            rows.append(["agent", names[node], *["-"] * len(sizes), *cells, f"{sum(agents.values()):.3f}"])
    return align(rows, left=(0, 1))


def _add_agent_spans(reports: Sequence[RankReport]) -> Mapping[str, float]:
    """Seconds by phase that agents spent on the shards of these ranks."""
    spent: dict[str, float] = {}
    for span in (span for one in reports for span in one.spans if span.by_agent):
        spent[span.phase] = spent.get(span.phase, 0.0) + span.busy_s
    return spent
