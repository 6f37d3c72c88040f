"""What one save or load did on one rank, as values."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class LoadReport:
    """What one load did on this rank. Bytes are of items, by where they came from; `bad_copies` were found and not used."""

    checkpoint_id: str
    save_id: str
    bytes_local: int
    bytes_peer: int
    bytes_object: int
    items: int
    seconds: float
    bad_copies: tuple[str, ...]
