"""What two tiers of one run are made with, which of their checkpoints is newer, and which saves go to the disk as well."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.config import Retention
from replicated_ckpt.core.lineage import Histories, Version
from replicated_ckpt.dcp.find.listing import Listed
from replicated_ckpt.errors import ObjectUnsafe, ReplicatedCkptError
from replicated_ckpt.searched import is_shortage

GENERATIONS = 2
"""So many checkpoints the memory tier keeps; the one that is being written comes on top."""
_ON_DISK_ONLY = ("object_store", "storage_options", "object_every", "object_retention", "retention")


def is_of_tier(error: CheckpointException) -> bool:
    """Whether a load may go on to what lies elsewhere: the bytes are the matter, not the state or what the caller allows.

    Nor a rank that can open no file now: what memory has may be intact, and newer. The same on all ranks: each is given the
    errors of all.
    """
    ours = [each for each, _ in error.failures.values() if isinstance(each, ReplicatedCkptError)]
    if any(is_shortage(each.message) for each in ours):
        return False
    return any(not isinstance(each, ObjectUnsafe) for each in ours)


def is_older(version: Version, others: list[Version]) -> bool:
    """Whether one of the others is newer: of another lineage, by the clock."""
    return any(
        other.sequence > version.sequence
        if other.lineage == version.lineage
        else other.created_unix_s > version.created_unix_s
        for other in others
    )


def version_of(listed: Listed) -> Version:
    return Version(listed.lineage, listed.sequence, 0.0, "")


def options_of_memory(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name not in _ON_DISK_ONLY}
    given["ack"] = "peer" if given.get("ack") == "object" else given.get("ack", "peer")
    return {**given, "retention": Retention(keep_last=GENERATIONS)}


def options_of_disk(options: Mapping[str, Any], spill_every: int) -> dict[str, Any]:
    """What counts checkpoints counts those on the disk. "Every one" stays that: some go to the disk out of their turn."""
    given = {**options}
    if options.get("object_store") is not None:
        given["object_every"] = _count_saves(options.get("object_every", 1), spill_every)
    for name in ("retention", "object_retention"):
        kept = options.get(name)
        if kept is not None and kept.keep_every is not None:
            given[name] = replace(kept, keep_every=_count_saves(kept.keep_every, spill_every))
    return given


def _count_saves(every: int, spill_every: int) -> int:
    """Of the run's saves, each so many-th: those are `every`-th of what goes to the disk."""
    return every if every == 1 else every * spill_every


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
