"""The report of one save: each rank has its own, and rank 0 those of all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from replicated_ckpt.core.divergence import Divergence
from replicated_ckpt.core.rank_report import RankReport, Span
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, ShardReceipt
from replicated_ckpt.dcp.save.replicas import is_copied
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.wording import align, describe_bytes, plural

PHASES = ("plan", "serialise", "write", "send", "fsync", "commit")
_WAITED_FOR = {
    "plan": "DCP's planning and the other ranks",
    "serialise": "its tensors",
    "write": "its own disk",
    "send": "its buddies",
    "fsync": "its own disk's fsync",
}


@dataclass(frozen=True)
class SaveReport:
    """One save, as this rank did it.

    `copies_made`: the smallest number of copies of any shard of this rank, its node's own copy included. It is 0, like
    the sizes, if the node's agent wrote and this rank did not get the result.

    `seconds`: from the start of the save to its commit. In `ranks`: to the end of the rank's own writing, or of its
    submission to the agent. `phases` has seconds, too: `plan` (until this rank may write, the wait for other ranks
    included), `serialise` (the thread that reads the tensors), `write` and `fsync` (this node's disk), `send` (the
    slowest buddy, its fsync included) and `commit` (from then on). Writing, sending and serialising overlap, so they
    add up to more than the elapsed time.

    `bytes_linked`: bytes of a file that was linked, because its bytes are those of the last save. It was not written or
    sent, and no other number includes it.

    `ranks`: on rank 0, once the save is committed, the reports of all ranks, in order. `divergences`: on rank 0, the
    values that this save has found to differ between ranks.
    """

    checkpoint_id: str
    save_id: str
    shards: tuple[str, ...]
    bytes_written: int
    bytes_replicated: int
    copies_wanted: int
    copies_made: int
    seconds: float
    rank: int = 0
    node_id: str = ""
    host: str = ""
    bytes_linked: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple["SaveReport", ...] = ()
    divergences: tuple[Divergence, ...] = ()

    def end(
        self,
        seconds: float,
        commit_s: float,
        ranks: tuple["SaveReport", ...],
        shards: Sequence[ShardReceipt],
        written: Sequence[WrittenCopies],
        helpers: int = 0,
    ) -> "SaveReport":
        """The report of a committed save.

        `shards`: the shards of this rank. `written`: those that its node's agent has written. `helpers`: the number of
        ranks that copied them. Only rank 0 has the number of their copies that count.
        """
        by_name = {copies.name: copies for copies in written}
        phases = {**self.phases, "commit": commit_s, **add_phases(copies.phases for copies in written)}
        size, replicated, copies = self.bytes_written, self.bytes_replicated, self.copies_made
        if ranks:  # on rank 0, from all receipts
            own = ranks[self.rank]
            size, replicated, copies = own.bytes_written, own.bytes_replicated, own.copies_made
        elif shards and all(shard.name in by_name or not shard.is_submitted for shard in shards):
            made = [(shard, by_name.get(shard.name, shard)) for shard in shards]
            size, replicated, copies = _count(
                [
                    (0 if shard.is_linked else one.size_bytes, len(one.holders) + (helpers * is_copied(one.name)))
                    for shard, one in made
                ]
            )
        counts = replace(self, bytes_written=size, bytes_replicated=replicated, copies_made=copies)
        return replace(counts, seconds=seconds, phases=phases, ranks=ranks)

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    def table(self) -> str:
        """Seconds by phase, a line for each rank that is known here."""
        rows = [["rank", "host", "bytes", "copies", *PHASES, "seconds"]]
        for one in self.ranks or (self,):
            phases = {**one.phases, **(self.phases if one.rank == self.rank else {})}
            spent = [f"{phases[name]:.3f}" if name in phases else "-" for name in PHASES]
            size, seconds = describe_bytes(one.bytes_written), f"{one.seconds:.3f}"
            rows.append([str(one.rank), one.host, size, str(one.copies_made), *spent, seconds])
        return align(rows)

    def __str__(self) -> str:
        """One line: what was saved, where, how fast, and which rank was slowest."""
        ranks = self.ranks or (self,)
        size, linked = sum(one.bytes_written for one in ranks), sum(one.bytes_linked for one in ranks)
        copies = min((one.copies_made for one in ranks if one.shards), default=self.copies_made)
        slowest = max(ranks, key=lambda one: one.seconds)
        phases = {name: spent for name, spent in slowest.phases.items() if name in _WAITED_FOR}
        most = max(phases, key=phases.__getitem__, default="")
        waited = f", {phases[most]:.2f} s for {_WAITED_FOR[most]}" if most else ""
        nodes, what = (
            plural(len({one.node_id for one in ranks}), "node"),
            f"{self.checkpoint_id} (save {self.save_id[:8]})",
        )
        made = f"{plural(copies, 'copy')} on {nodes}, {describe_bytes(size)} in {self.seconds:.2f} s "
        made += f"({describe_bytes(size / max(self.seconds, 1e-9))}/s)"
        made += f", {describe_bytes(linked)} unchanged" if linked else ""
        return (
            f"saved {what}: {made if copies else f'on {nodes} in {self.seconds:.2f} s'}; slowest rank {slowest.rank} on "
            f"{slowest.host}: written after {slowest.seconds:.2f} s{waited}"
        )


def report_save(decision: SaveDecision, rank: int, receipt: Receipt, copies_wanted: int) -> SaveReport:
    """The report of a rank, from what it wrote."""
    node = decision.node_of(rank)
    written = [(0 if shard.is_linked else shard.size_bytes, len(shard.holders)) for shard in receipt.shards]
    size, replicated, copies = _count(written or [(0, decision.placement.copies)])
    return SaveReport(
        decision.checkpoint_id,
        decision.save_id,
        tuple(shard.name for shard in receipt.shards),
        size,
        replicated,
        copies_wanted,
        copies,
        receipt.seconds,
        rank,
        node.node_id,
        node.host,
        sum(shard.size_bytes for shard in receipt.shards if shard.is_linked),
        receipt.phases,
    )


def report_to_agent(
    report: SaveReport, ended_unix_s: float, decision: SaveDecision, spans: Sequence[Span]
) -> RankReport:
    """This rank's part in a committed save; on rank 0 with the parts of all ranks. `spans`: those of this rank's writes."""
    plan_s, commit_s = (report.phases.get(name, 0.0) for name in ("plan", "commit"))
    around = (
        Span("plan", 0.0, plan_s, plan_s),
        Span("commit", max(0.0, report.seconds - commit_s), report.seconds, commit_s),
    )
    sent = add_phases({span.node: span.busy_s} for span in spans if span.phase == "send")
    buddies = decision.buddies_of(report.node_id)
    # For another rank, rank 0 has only one figure for all its buddies together.
    if not spans and len(buddies) == 1 and "send" in report.phases:
        sent = {buddies[0]: report.phases["send"]}
    return RankReport(
        "save",
        report.checkpoint_id,
        report.save_id,
        report.rank,
        report.host,
        ended_unix_s,
        report.seconds,
        report.phases,
        {"written": report.bytes_written, "replicated": report.bytes_replicated, "linked": report.bytes_linked},
        copies=report.copies_made,
        divergences=len(report.divergences),
        node_id=report.node_id,
        operation=report.save_id,
        seconds_by_node=sent,
        spans=(*around, *spans) if spans else (),
        ranks=tuple(report_to_agent(one, ended_unix_s, decision, ()) for one in report.ranks),
    )


def _count(shards: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Bytes written, bytes replicated and the least number of copies, from bytes and copies of each shard."""
    replicated = sum(size * max(0, copies - 1) for size, copies in shards)
    return sum(size for size, _ in shards), replicated, min(copies for _, copies in shards)


def add_phases(phases: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The seconds of each phase, of all shards together."""
    added: dict[str, float] = {}
    for one in phases:
        for name, spent in one.items():
            added[name] = added.get(name, 0.0) + spent
    return added


def report_ranks(decision: SaveDecision, receipts: Sequence[Receipt], copies_wanted: int) -> tuple[SaveReport, ...]:
    """The reports of all ranks, from their receipts."""
    return tuple(report_save(decision, rank, receipt, copies_wanted) for rank, receipt in enumerate(receipts))
