"""A memory tier that a job used with this store before, and does not use now: what it has must not look newer later."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicated_ckpt.core.lineage import Histories, History, Version, merge_histories, newest_lineage
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.c10d.lent_group import agree_on_all
from replicated_ckpt.dcp.node.seen_lineage import join_lineages, seen_lineage
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)
_LEFT = (
    "%s: the memory tier at %s, which is not used now, has newer checkpoints of this run than this job goes on with. "
    "To load those, end this job and pass memory= as before. What this job saves is newer than they are."
)


def join_left_tier(group: Any, stores: Sequence[LocalStore], checkpoint_id: str, in_use: Path | None = None) -> None:
    """What this process saves next is newer than all that is in a tier that was used with the first of these stores.

    So a job that uses that tier again loads what was saved meanwhile, and not what the tier has had all the time. Called by
    all ranks of the group, before the first save; what is in the tier and newer than in the stores is logged.
    """
    scope = scope_of(checkpoint_id)
    told = agree_on_all(
        group, lambda: (_histories_of_left(stores[0], scope, in_use), readable_histories(stores, scope))
    )
    left, held = (merge_histories(histories) for histories in zip(*told, strict=True))
    seen = seen_lineage(stores[0], scope)
    lineage = newest_lineage({**left, **held}) if seen is None else seen[0]
    if lineage is None or lineage not in left:
        return
    if left[lineage].sequence > held.get(lineage, History(0)).sequence:
        log.warning(_LEFT, stores[0].root, _root_of_left(stores[0], in_use) or "another node's memory")
    if seen is not None or lineage in held:
        newest = left[lineage]
        join_lineages(stores, checkpoint_id, Version(lineage, newest.sequence, newest.created_unix_s, ""))


def _root_of_left(store: LocalStore, in_use: Path | None) -> Path | None:
    with contextlib.suppress(ReplicatedCkptError):  # what another user can have written is not looked at
        root = find_memory_tier(store)
        return None if root == in_use else root
    return None


def _histories_of_left(store: LocalStore, scope: str, in_use: Path | None) -> Histories:
    root = _root_of_left(store, in_use)
    return {} if root is None else readable_histories([LocalStore(root)], scope)


def readable_histories(stores: Sequence[LocalStore], scope: str) -> Histories:
    """The lineages in these stores of this node, as far as they can be read: a save or a load says what cannot."""
    found = []
    for store in stores:
        with contextlib.suppress(ReplicatedCkptError), translate_errors(str(store.root), "list", "checkpoints"):
            found.append(store.catalog.histories(scope))
    return merge_histories(found)
