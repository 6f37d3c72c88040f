"""The report of one save: on each rank its own, on rank 0 with those of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from replicated_ckpt.core.divergence import Divergence
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, ShardReceipt
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
    """One save as this rank did it. `copies_made` is the least over this rank's shards, the node's own copy counted. It
    is 0, as the sizes are, where this rank has no result of what its node's agent wrote for it.

    `seconds`: from the begin of the save to its commit; in `ranks`, to the end of the rank's own writing, or of the
    submission to its agent. `phases` are seconds, too: `plan` (until this rank may write, the other ranks included),
    `serialise` (the thread that goes through the tensors), `write` and `fsync` (this node's disk), `send` (the slowest
    buddy, its fsync included) and `commit` (from then on). Writing, sending and serialising go on at once, so they add
    up to more than the time that passed.

    `ranks`: on rank 0, once the save is committed, the reports of all ranks, in order. `divergences`: on rank 0, the values
    that this save has found to differ between ranks.
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
    phases: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple["SaveReport", ...] = ()
    divergences: tuple[Divergence, ...] = ()

    def end(
        self,
        seconds: float,
        commit_s: float,
        ranks: tuple["SaveReport", ...],
        written: WrittenCopies | None,
        helpers: int = 0,
    ) -> "SaveReport":
        """The report of a save that is committed. `written`: the copies that this node's agent has written for the rank.

        `helpers`: the ranks that copied its shard. A copy of theirs that does not count is known to rank 0 only.
        """
        phases = {**self.phases, "commit": commit_s}
        if ranks:  # on rank 0, from all receipts
            own = ranks[self.rank]
            made = {name: getattr(own, name) for name in ("bytes_written", "bytes_replicated", "copies_made")}
            agents = written.phases if written is not None else {}
            return replace(self, seconds=seconds, phases={**phases, **agents}, ranks=ranks, **made)
        if written is None:
            copies = self.copies_made + helpers if self.shards and self.bytes_written else self.copies_made
            replicated = self.bytes_replicated + helpers * self.bytes_written
            return replace(self, seconds=seconds, phases=phases, copies_made=copies, bytes_replicated=replicated)
        size, others = written.size_bytes, len(written.holders) - 1 + helpers
        phases |= written.phases
        own = replace(self, bytes_written=size, bytes_replicated=size * others, copies_made=1 + others)
        return replace(own, seconds=seconds, phases=phases, ranks=ranks)

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
        size = sum(one.bytes_written for one in ranks)
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
        return (
            f"saved {what}: {made if copies else f'on {nodes} in {self.seconds:.2f} s'}; slowest rank {slowest.rank} on "
            f"{slowest.host}: written after {slowest.seconds:.2f} s{waited}"
        )


def report_save(decision: SaveDecision, rank: int, receipt: Receipt, copies_wanted: int) -> SaveReport:
    """The report of a rank that wrote one shard, or none."""
    shard: ShardReceipt | None = receipt.shards[0] if receipt.shards else None
    size = shard.size_bytes if shard else 0
    holders = len(shard.holders) if shard else decision.placement.copies
    node = decision.node_of(rank)
    return SaveReport(
        decision.checkpoint_id,
        decision.save_id,
        (shard.name,) if shard else (),
        size,
        size * (holders - 1),
        copies_wanted,
        holders,
        receipt.seconds,
        rank,
        node.node_id,
        node.host,
        receipt.phases,
    )


def report_ranks(decision: SaveDecision, receipts: Sequence[Receipt], copies_wanted: int) -> tuple[SaveReport, ...]:
    """The reports of all ranks, from their receipts."""
    return tuple(report_save(decision, rank, receipt, copies_wanted) for rank, receipt in enumerate(receipts))
