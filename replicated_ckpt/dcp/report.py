"""What one save or load did on one rank, as values."""

from dataclasses import dataclass

from replicated_ckpt.dcp.decision import SaveDecision, ShardReceipt


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


def reported(decision: SaveDecision, receipt: ShardReceipt | None, copies_wanted: int, seconds: float) -> SaveReport:
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


@dataclass(frozen=True)
class LoadReport:
    """What one load did on this rank. `bad_copies` were found and not used.

    Bytes are those that this rank read, in whole blocks, by where they came from: its own store, peers, the bucket; and
    `bytes_shared`, without the rest of their blocks, another rank of this node had fetched.
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
