"""What a crash left in the trash of a node goes when its agent starts, what an error left a while later; no load waits."""

import logging

from replicated_ckpt.core.layout import TRASH_DIR
from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.files.existence import list_prefixed
from replicated_ckpt.stores.local.room_to_start import lacks_room_to_start
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)


def empty_trash(store: LocalStore) -> None:
    """In a thread, as terabytes take long; at once if the disk has no room for the small files that an agent writes.

    A save that opens meanwhile waits for the end before it is decided.
    """
    if lacks_room_to_start(store.root):
        _empty(store)
    else:
        start_worker(_empty, store, name="rckpt-trash")


def empty_what_is_left(store: LocalStore) -> None:
    """Of what an error kept from being removed, as a commit that was refused something by the disk. For each look around.

    Nothing lies in the trash otherwise, but under the lock of the store, for which this waits.
    """
    if list_prefixed(store.root / TRASH_DIR, ""):
        _empty(store)


def _empty(store: LocalStore) -> None:
    try:
        store.empty_trash()
    except StoreError as exc:
        log.error("the trash is not emptied for now: %s", exc)  # noqa: TRY400 - it explains itself
