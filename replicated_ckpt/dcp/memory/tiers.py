"""The two tiers of one run: the options of each, the newer of their checkpoints, and the saves that also go to the disk."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.config import Retention
from replicated_ckpt.core.lineage import Histories, History, Version, merge_histories, newest_lineage, newest_version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.node_post import find_seen_lineage, join_lineages
from replicated_ckpt.dcp.c10d.group_pool import agree_on_all
from replicated_ckpt.dcp.find.listing import Listed
from replicated_ckpt.errors import ObjectUnsafe, ReplicatedCkptError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import is_shortage

log = logging.getLogger(__name__)

GENERATIONS = 2
"""How many checkpoints the memory tier keeps, in addition to the one being written."""
_ON_DISK_ONLY = ("object_store", "storage_options", "object_every", "object_retention", "retention")


def is_of_tier(error: CheckpointException) -> bool:
    """Whether a load may try the other tier: its error is about stored data, not about the caller's state or limits.

    False if a rank is short of descriptors or memory: this tier's data may be intact, and newer. The result is the same
    on all ranks, because each has the errors of all.
    """
    # Another class is the user's own error, as of a state that does not fit: another tier would not help.
    ours = [each for each, _ in error.failures.values() if isinstance(each, ReplicatedCkptError)]
    if any(is_shortage(each.message) for each in ours):
        return False
    return any(not isinstance(each, ObjectUnsafe) for each in ours)


def is_older(version: Version, others: list[Version]) -> bool:
    """Whether one of the others is newer: by sequence in the same lineage, otherwise by the clock."""
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
    # The bucket is the disk tier's: with "object" this tier would wait for an upload that never comes.
    given["ack"] = "peer" if given.get("ack") == "object" else given.get("ack", "peer")
    return {**given, "retention": Retention(keep_last=GENERATIONS)}


def options_of_disk(options: Mapping[str, Any], disk_every: int) -> dict[str, Any]:
    """The options with intervals in saves of the run, not in checkpoints on the disk. 1 stays 1, because some saves go to
    the disk out of turn.
    """
    given = {**options}
    if options.get("object_store") is not None:
        given["object_every"] = _count_saves(options.get("object_every", 1), disk_every)
    for name in ("retention", "object_retention"):
        kept = options.get(name)
        if kept is not None and kept.keep_every is not None:
            given[name] = replace(kept, keep_every=_count_saves(kept.keep_every, disk_every))
    return given


def _count_saves(every: int, disk_every: int) -> int:
    """Converts an interval in checkpoints on the disk into one in saves of the run. 1 stays 1."""
    return every if every == 1 else every * disk_every


class DiskSaveCount:
    """Decides which saves go to the disk: each whose sequence is a multiple of `every`. If such a save did not reach the
    disk, for example because all trainers ended, the next save goes there.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._newest: dict[str, int] = {}

    def learn(self, on_disk: Histories) -> None:
        """Starts from the checkpoints on the job's disks when it begins to save."""
        self._newest = {lineage: history.sequence for lineage, history in on_disk.items()}

    def is_due(self, saved: Version) -> bool:
        """Whether a save in memory must go to the disk, because the disk has no save since the last multiple of `every`."""
        return saved.sequence // self._every > self._newest.get(saved.lineage, 0) // self._every

    def record_disk_save(self, on_disk: Version) -> None:
        """Records a save that is on the disk."""
        self._newest[on_disk.lineage] = on_disk.sequence


_LEFT = (
    "%s: the unused memory tier at %s has newer checkpoints of this run than the one that this job continues from. To load "
    "those, end this job now, and pass memory= as before. Once this job has saved, loads take its saves instead."
)


def join_left_tier(
    group: Any, stores: Sequence[LocalStore], checkpoint_id: str, in_use: Path | None = None
) -> Sequence[Histories]:
    """Makes this process's next save newer than everything in a memory tier that an earlier job used with the first of
    these stores.

    A job that uses that tier again then loads the saves made meanwhile, instead of the tier's older state. Called by
    all ranks of the group, before the first save. Logs if the tier has newer checkpoints than the stores. Returns
    the histories of each store on all ranks' nodes.
    """
    scope = scope_of(checkpoint_id)
    told = agree_on_all(
        group,
        lambda: [
            _histories_of_left(stores[0], scope, in_use),
            *(_readable_histories(store, scope) for store in stores),
        ],
    )
    left, *by_store = (merge_histories(histories) for histories in zip(*told, strict=True))
    held = merge_histories(by_store)
    seen = find_seen_lineage(stores[0], scope)
    lineage = newest_lineage({**left, **held}) if seen is None else seen[0]
    # Nothing was left, or only checkpoints of other runs.
    if lineage is None or lineage not in left:
        return by_store
    if left[lineage].sequence > held.get(lineage, History(0)).sequence:
        log.warning(_LEFT, stores[0].root, _root_of_left(stores[0], in_use) or "another node's memory")
    # Only for a run that continues here: a new run must not take over a lineage that it never loaded.
    if seen is not None or lineage in held:
        join_lineages(stores, checkpoint_id, newest_version(left, lineage))
    return by_store


def _root_of_left(store: LocalStore, in_use: Path | None) -> Path | None:
    with contextlib.suppress(ReplicatedCkptError):  # a record that another user may have written is ignored
        root = find_memory_tier(store)
        return None if root == in_use else root
    return None


def _histories_of_left(store: LocalStore, scope: str, in_use: Path | None) -> Histories:
    root = _root_of_left(store, in_use)
    return {} if root is None else _readable_histories(LocalStore(root), scope)


def _readable_histories(store: LocalStore, scope: str) -> Histories:
    """The lineages in a store of this node. Empty if it cannot be read: a save or a load reports that."""
    with contextlib.suppress(ReplicatedCkptError), translate_errors(str(store.root), "list", "checkpoints"):
        return store.catalog.histories(scope)
    return {}
