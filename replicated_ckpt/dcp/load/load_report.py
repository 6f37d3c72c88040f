"""The report of one load. Each rank has its own; rank 0 has those of all ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from replicated_ckpt.core.rank_report import RankReport, Span
from replicated_ckpt.wording import align, describe_bytes, plural

PHASES = ("plan", "read")


@dataclass(frozen=True)
class LoadReport:
    """One load as this rank did it. `bad_copies` are the copies that failed, with their errors.

    `bytes_local`, `bytes_peer` and `bytes_object` count the blocks that this rank read from its own store, from peers and
    from the bucket. `bytes_shared` counts the bytes, not blocks, that another rank of this node had fetched.

    `seconds_by_node` has the seconds of reading from each node, including this one and the bucket ("object-store"),
    summed over all threads. `load_id` is the same on all ranks of the load.

    `phases` has seconds: `plan` until this rank may read, including the wait for other ranks; then `read`. On rank 0,
    `ranks` has the reports of all ranks in order, once all have read.
    """

    checkpoint_id: str
    save_id: str
    bytes_local: int
    bytes_peer: int
    bytes_object: int
    items: int
    seconds: float
    bad_copies: tuple[str, ...]
    bytes_shared: int = 0
    rank: int = 0
    host: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    node_id: str = ""
    load_id: str = ""
    seconds_by_node: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple["LoadReport", ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank read from all sources. Bytes that another rank of its node fetched are not included."""
        return self.bytes_local + self.bytes_peer + self.bytes_object

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoadReport":
        """One rank's report from `as_dict`, without those of other ranks. Unknown fields are ignored."""
        # Ranks of two releases may load together.
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**{**known, "bad_copies": tuple(known["bad_copies"]), "ranks": ()})

    def table(self) -> str:
        """Bytes by source and seconds by phase, a line for each rank that is known here."""
        rows = [["rank", "host", "local", "peer", "bucket", "shared", *PHASES, "seconds"]]
        for one in self.ranks or (self,):
            sizes = (one.bytes_local, one.bytes_peer, one.bytes_object, one.bytes_shared)
            spent = [f"{one.phases[name]:.3f}" if name in one.phases else "-" for name in PHASES]
            rows.append([str(one.rank), one.host, *map(describe_bytes, sizes), *spent, f"{one.seconds:.3f}"])
        return align(rows)

    def __str__(self) -> str:
        """One line: what was loaded, how fast, from where, and which rank was slowest."""
        ranks = self.ranks or (self,)
        size = sum(one.bytes_read for one in ranks)
        local, peer, bucket = (
            sum(getattr(one, f"bytes_{name}") for one in ranks) for name in ("local", "peer", "object")
        )
        slowest = max(ranks, key=lambda one: one.seconds)
        most = max(slowest.phases, key=slowest.phases.__getitem__, default="")
        waited = {"plan": "for the other ranks and the plan", "read": f"to read from {slowest.main_source}"}.get(
            most, ""
        )
        bad = sum(len(one.bad_copies) for one in ranks)
        total, rate = describe_bytes(size), describe_bytes(size / max(slowest.seconds, 1e-9))
        return (
            f"loaded {self.checkpoint_id} (save {self.save_id[:8]}) on {plural(len(ranks), 'rank')}: {total} in "
            f"{slowest.seconds:.2f} s ({rate}/s), {describe_bytes(local)} local, {describe_bytes(peer)} from peers, "
            f"{describe_bytes(bucket)} from the bucket; slowest rank {slowest.rank} on {slowest.host}"
            + (f": {slowest.phases[most]:.2f} s {waited}" if waited else "")
            + (f"; {plural(bad, 'bad copy')} not used" if bad else "")
        )

    @property
    def main_source(self) -> str:
        """The source of most of this rank's bytes."""
        sizes = {
            "its own disk": self.bytes_local,
            "peers": self.bytes_peer,
            "the bucket": self.bytes_object,
            "other ranks of its node": self.bytes_shared,
        }
        return max(sizes, key=sizes.__getitem__)


def report_to_agent(report: LoadReport, ended_unix_s: float) -> RankReport:
    """This rank's report to its agent, of a load that all ranks have ended; on rank 0 with the reports of all ranks."""
    plan_s, read_s = (report.phases.get(name, 0.0) for name in PHASES)
    sizes = {name: getattr(report, f"bytes_{name}") for name in ("local", "peer", "object", "shared")}
    return RankReport(
        "load",
        report.checkpoint_id,
        report.save_id,
        report.rank,
        report.host,
        ended_unix_s,
        report.seconds,
        report.phases,
        sizes,
        bad_copies=len(report.bad_copies),
        node_id=report.node_id,
        operation=report.load_id,
        seconds_by_node=report.seconds_by_node,
        spans=(Span("plan", 0.0, plan_s, plan_s), Span("read", plan_s, plan_s + read_s, read_s)),
        ranks=tuple(report_to_agent(one, ended_unix_s) for one in report.ranks),
    )
