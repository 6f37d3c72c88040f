"""What one save did on one rank."""

from dataclasses import dataclass

from replicated_ckpt.dcp.save.decision import SaveDecision, ShardReceipt


@dataclass(frozen=True)
class SaveReport:
    """What one save did on this rank. `copies_made` is the least over this rank's shards, the own one counted."""

    checkpoint_id: str
    save_id: str
    shards: tuple[str, ...]
    bytes_written: int
    bytes_replicated: int
    copies_wanted: int
    copies_made: int
    seconds: float


def report_save(decision: SaveDecision, receipt: ShardReceipt | None, copies_wanted: int, seconds: float) -> SaveReport:
    """What a rank that wrote one shard, or none, did for a save."""
    size = receipt.size_bytes if receipt else 0
    holders = len(receipt.holders) if receipt else decision.placement.copies
    return SaveReport(
        decision.checkpoint_id,
        decision.save_id,
        (receipt.name,) if receipt else (),
        size,
        size * (holders - 1),
        copies_wanted,
        holders,
        seconds,
    )
