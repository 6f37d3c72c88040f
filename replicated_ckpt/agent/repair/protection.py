"""Protection: what one round of re-protection has found, as the status tells it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protection:
    """What one round found. `is_complete`: every checkpoint has its number of copies, and no silent node is waited for.

    `planned`: what all nodes together have to do. `failed`: what this node could not do, in words. `short` and `lost`:
    shards that nothing can be done for now, for want of nodes or of any copy. `in_doubt`: a node fell silent and is not
    given up yet.
    """

    is_complete: bool
    planned: int = 0
    done: int = 0
    failed: tuple[str, ...] = ()
    short: int = 0
    lost: int = 0
    in_doubt: bool = False
