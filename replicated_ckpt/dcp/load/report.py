"""What one load did on one rank."""

from dataclasses import dataclass


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
