"""A leftover: a save that is staged on this node and that may be over."""

from dataclasses import dataclass

from replicated_ckpt.stores.local.directories.intent import Intent


@dataclass(frozen=True)
class Leftover:
    """A save that is staged here and over: to be completed if it was decided anywhere, else removed.

    One that `may_live` is left as it is where it was not decided.
    """

    intent: Intent
    why: str
    may_live: bool = False
    is_over: bool = False
    """Another save has shown that it is: it has overtaken it, or is of the same process group."""
    is_left: bool = False
    """Its own coordinator has gone on to another save: whatever locks its ranks have left, it decides this one no more."""
