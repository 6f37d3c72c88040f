"""What this process has loaded and saved: the next save in that directory of checkpoints continues the same lineage."""

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
    """A load or save of this process was of this lineage; `newest` is the newest of its saves that was seen."""
    key = store.root, scope_of(checkpoint_id)
    known = _seen.get(key)
    sequence = min(newest.sequence, SEQUENCE_FLOOR_MAX)
    if known is not None and known[0] == newest.lineage:
        sequence = max(sequence, known[1])
    _seen[key] = newest.lineage, sequence


@contextmanager
def forgotten_on_error(*stores: LocalStore) -> Iterator[None]:
    """If the block raises, what this process saves next in these stores goes on with what it went on with before."""
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
    """What this process saves next is of the lineage of `newest` in each of these stores, and newer than all in any."""
    seen = [find_seen_lineage(store, scope_of(checkpoint_id)) for store in stores]
    known = [sequence for lineage, sequence in filter(None, seen) if lineage == newest.lineage]
    joined = replace(newest, sequence=max([newest.sequence, *known]))
    for store in stores if newest.lineage else ():
        remember(store, checkpoint_id, joined)
