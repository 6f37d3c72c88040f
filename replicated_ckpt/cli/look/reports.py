"""The reports of ranks on all nodes that answer: the newest save and the newest load of one checkpoint."""

import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.core.rank_report import Kind, RankReport
from replicated_ckpt.node.state.rank_reports import RankReports
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.threads import FanOut


def look_at_reports(store: LocalStore, seen: NodesSeen, checkpoint_id: str) -> tuple[Sequence[RankReport], NodesSeen]:
    """What this node keeps, and what the other nodes return that answered before; also the nodes that do so still.

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
    # A node that has stopped answering, or an agent of a release without reports, costs only its own.
    still = replace(seen, unreached={**seen.unreached, **others.errors})
    return [report for report in found if report.checkpoint_id == checkpoint_id], still


def choose_newest(reports: Iterable[RankReport], kind: Kind) -> Sequence[RankReport]:
    """The reports of the newest save or load, one of each known rank, in order. Empty: there is none.

    A rank's own report is taken before the shorter one that rank 0 has of it.
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
