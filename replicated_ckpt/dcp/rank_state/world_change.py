"""The error of a load by another number of ranks than saved, where a rank wants what it alone had."""

from collections.abc import Sequence

from replicated_ckpt.errors import ReplicatedCkptError


class WorldSizeChanged(ReplicatedCkptError):
    """A RankState was saved by another number of ranks. What else the load was given is loaded; no RankState is."""

    default_hint = (
        'Start as many ranks as saved, or pass RankState(on_other_world="keep"): generators and data then stay as the '
        "program set them."
    )

    def __init__(self, saved: Sequence[int], now: int) -> None:
        by = " or ".join(str(world) for world in saved)
        had = f"The checkpoint has what each of {by} ranks had for itself" if by else "The checkpoint has no RankState"
        super().__init__(f"{had}, and {now} {'rank loads' if now == 1 else 'ranks load'} it.")
        self.args = (tuple(saved), now)
        self.saved = tuple(saved)
        self.now = now
