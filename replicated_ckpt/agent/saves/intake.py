"""The intake: how many bytes of each open save peers have brought, held against what its opening announced."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.errors import PeerProtocolError
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX

Take = Callable[[int], None]
"""Told how many bytes are about to be written; raises if they are too many."""
_KEPT = 64
_HINT = "Nothing of this file was kept. Objects that are too large for a shard can be saved as tensors."


class _Taken:
    """What has come of one save: bytes of shards that are there, and of those that are coming in. Under the lock alone."""

    def __init__(self) -> None:
        self.whole: dict[str, int] = {}
        self.coming: dict[object, tuple[str, int]] = {}

    def total(self) -> int:
        """One that is brought again counts as it comes in, and not twice."""
        again = {name for name, _ in self.coming.values()}
        whole = sum(size for name, size in self.whole.items() if name not in again)
        return whole + sum(size for _, size in self.coming.values())


class Intake:
    """Bytes by save and shard. Safe for concurrent use. A new start of the agent begins to count anew."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._taken_by_save: dict[str, _Taken] = {}

    @contextmanager
    def taking(self, intent: Intent, name: str, size_bytes: int | None) -> Iterator[Take]:
        """Counts one shard of a save while it is taken. `size_bytes`: its size, if it is said beforehand.

        Raises, as what is yielded does:
            PeerProtocolError: it, or the save with it, is larger than was announced.
        """
        taken = self._of(intent.save_id)
        this, count = object(), 0

        def take(more: int) -> None:
            nonlocal count
            count += more
            with self._lock:
                taken.coming[this] = name, count
                total = taken.total()
            _check(intent, name, count, total)

        try:
            take(size_bytes or 0)
            count = 0
            yield take
        except BaseException:
            with self._lock:
                taken.coming.pop(this, None)
            raise
        with self._lock:
            taken.coming.pop(this, None)
            taken.whole[name] = count

    def _of(self, save_id: str) -> _Taken:
        with self._lock:
            if len(self._taken_by_save) >= _KEPT:
                over = [known for known in self._taken_by_save if not self._store.is_staged(known)]
                for known in over:
                    del self._taken_by_save[known]
            return self._taken_by_save.setdefault(save_id, _Taken())


@contextmanager
def taking_metadata(intent: Intent, size_bytes: int | None) -> Iterator[Take]:
    """As `Intake.taking`, for `.metadata`, which may have what a file that is believed may have."""
    count = 0

    def take(more: int) -> None:
        nonlocal count
        count += more
        if count > FILE_BYTES_MAX:
            raise _too_much(intent, f"{METADATA_NAME} has more than {FILE_BYTES_MAX} bytes, which none may have")

    take(size_bytes or 0)
    count = 0
    yield take


def _check(intent: Intent, name: str, count: int, total: int) -> None:
    shard, save = intent.announced.shard_bytes_max, intent.announced.save_bytes_max
    if shard and count > shard:
        raise _too_much(intent, f"{name} has more than {shard} bytes, the most that its opening announced for a shard")
    if save and total > save:
        raise _too_much(intent, f"{name} makes it more than {save} bytes, the most that its opening announced for all")


def _too_much(intent: Intent, what: str) -> PeerProtocolError:
    return PeerProtocolError(f"Save {intent.save_id} of {intent.checkpoint_id!r}: {what}.", _HINT)
