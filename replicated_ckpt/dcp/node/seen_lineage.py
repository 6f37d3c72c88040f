"""What this process has loaded and saved: the next save in that directory of checkpoints continues the same lineage."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.stores.local.store import LocalStore

_seen: dict[tuple[Path, str], tuple[str, int]] = {}


def remember(store: LocalStore, checkpoint_id: str, newest: Version) -> None:
    """A load or save of this process was of this lineage; `newest` is the newest of its saves that was seen."""
    key = store.root, scope_of(checkpoint_id)
    known = _seen.get(key)
    sequence = min(newest.sequence, SEQUENCE_FLOOR_MAX)
    if known is not None and known[0] == newest.lineage:
        sequence = max(sequence, known[1])
    _seen[key] = newest.lineage, sequence


def find_seen_lineage(store: LocalStore, scope: str) -> tuple[str, int] | None:
    """The lineage that this process continues in a directory of checkpoints, and the largest sequence it has seen of it."""
    return _seen.get((store.root, scope))


def join_lineages(stores: Sequence[LocalStore], checkpoint_id: str, newest: Version) -> None:
    """What this process saves next is of the lineage of `newest` in each of these stores, and newer than all in any."""
    seen = [find_seen_lineage(store, scope_of(checkpoint_id)) for store in stores]
    known = [sequence for lineage, sequence in filter(None, seen) if lineage == newest.lineage]
    joined = replace(newest, sequence=max([newest.sequence, *known]))
    for store in stores if newest.lineage else ():
        remember(store, checkpoint_id, joined)
