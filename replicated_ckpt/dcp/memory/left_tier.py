"""A memory tier that a job used with this store before, and does not use now: what it has must not look newer later."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicated_ckpt.core.lineage import Histories, History, merge_histories, newest_lineage, newest_version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.c10d.lent_group import agree_on_all
from replicated_ckpt.dcp.node.seen_lineage import find_seen_lineage, join_lineages
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)
_LEFT = (
    "%s: the memory tier at %s, which is not used now, has newer checkpoints of this run than this job goes on with. "
    "To load those, end this job and pass memory= as before. What this job saves is newer than they are."
)


def join_left_tier(
    group: Any, stores: Sequence[LocalStore], checkpoint_id: str, in_use: Path | None = None
) -> Sequence[Histories]:
    """What this process saves next is newer than all that is in a tier that was used with the first of these stores.

    So a job that uses that tier again loads what was saved meanwhile, and not what the tier has had all the time. Called by
    all ranks of the group, before the first save; what is in the tier and newer than in the stores is logged. Returns what
    each of the stores holds, on all ranks' nodes.
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
    if lineage is None or lineage not in left:
        return by_store
    if left[lineage].sequence > held.get(lineage, History(0)).sequence:
        log.warning(_LEFT, stores[0].root, _root_of_left(stores[0], in_use) or "another node's memory")
    if seen is not None or lineage in held:
        join_lineages(stores, checkpoint_id, newest_version(left, lineage))
    return by_store


def _root_of_left(store: LocalStore, in_use: Path | None) -> Path | None:
    with contextlib.suppress(ReplicatedCkptError):  # what another user can have written is not looked at
        root = find_memory_tier(store)
        return None if root == in_use else root
    return None


def _histories_of_left(store: LocalStore, scope: str, in_use: Path | None) -> Histories:
    root = _root_of_left(store, in_use)
    return {} if root is None else _readable_histories(LocalStore(root), scope)


def _readable_histories(store: LocalStore, scope: str) -> Histories:
    """The lineages in a store of this node, if it can be read: if not, a save or a load says so."""
    with contextlib.suppress(ReplicatedCkptError), translate_errors(str(store.root), "list", "checkpoints"):
        return store.catalog.histories(scope)
    return {}
