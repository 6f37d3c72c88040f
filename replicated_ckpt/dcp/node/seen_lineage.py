"""The lineages that this process has loaded and saved: the next save in the same directory of ids continues its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.stores.local.store import LocalStore

_seen: dict[tuple[Path, str], tuple[str, int]] = {}


def remember(store: LocalStore, checkpoint_id: str, newest: Version) -> None:
    """Records that a load or save of this process was of this lineage; `newest` is the newest of its saves seen so far."""
    key = store.root, scope_of(checkpoint_id)
    known = _seen.get(key)
    # A number that a damaged store claims must not use up all that follow.
    sequence = min(newest.sequence, SEQUENCE_FLOOR_MAX)
    # Never back: after a rollback to an older checkpoint the next save is still newer than those it has seen.
    if known is not None and known[0] == newest.lineage:
        sequence = max(sequence, known[1])
    _seen[key] = newest.lineage, sequence


@contextmanager
def forgotten_on_error(*stores: LocalStore) -> Iterator[None]:
    """If the block raises, this process's next save in these stores continues the same lineage as before the block."""
    roots = {store.root for store in stores}
    before = {key: seen for key, seen in _seen.items() if key[0] in roots}
    try:
        yield
    except BaseException:
        for key in [key for key in _seen if key[0] in roots]:
            del _seen[key]
        _seen.update(before)
        raise


def find_seen_lineage(store: LocalStore, scope: str) -> tuple[str, int] | None:
    """The lineage that this process continues in a directory of checkpoints, and the largest sequence it has seen of it."""
    return _seen.get((store.root, scope))


def join_lineages(stores: Sequence[LocalStore], checkpoint_id: str, newest: Version) -> None:
    """Makes this process's next save continue the lineage of `newest` in each store, newer than all saves in any."""
    seen = [find_seen_lineage(store, scope_of(checkpoint_id)) for store in stores]
    known = [sequence for lineage, sequence in filter(None, seen) if lineage == newest.lineage]
    joined = replace(newest, sequence=max([newest.sequence, *known]))
    for store in stores if newest.lineage else ():
        remember(store, checkpoint_id, joined)
