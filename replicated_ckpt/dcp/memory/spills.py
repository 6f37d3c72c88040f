"""Which saves of a run with a memory tier go to the disk as well: counted by what the disk has."""

from replicated_ckpt.core.lineage import Histories, Version


class SpillCount:
    """Every `every`-th save goes to the disk, by its sequence; one that did not come there makes the next one due.

    So it does not matter what kept it from the disk: an error, or the end of all trainers between the two tiers.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._newest: dict[str, int] = {}

    def learn(self, on_disk: Histories) -> None:
        """What the disks of the job hold when it begins to save."""
        self._newest = {lineage: history.sequence for lineage, history in on_disk.items()}

    def is_due(self, saved: Version) -> bool:
        """Whether what was saved to memory goes to the disk: nothing from the last multiple of `every` on is there."""
        return saved.sequence // self._every > self._newest.get(saved.lineage, 0) // self._every

    def note(self, spilled: Version) -> None:
        """The disk has it."""
        self._newest[spilled.lineage] = spilled.sequence
