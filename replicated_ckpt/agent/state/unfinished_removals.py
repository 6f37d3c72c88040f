"""Removals that a crash broke off end when the agent of the node starts; no load waits for that."""

import logging

from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.local.room_to_start import lacks_room_to_start
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)


def finish_removals(store: LocalStore) -> None:
    """In a thread, as terabytes take long; at once if the disk has no room for the small files that an agent writes."""
    if lacks_room_to_start(store.root):
        _finish(store)
    else:
        start_worker(_finish, store, name="rckpt-removals")


def _finish(store: LocalStore) -> None:
    try:
        store.tidy(is_alone=False)
    except StoreError as exc:
        log.error("what a crash has left stays for now: %s", exc)  # noqa: TRY400 - it explains itself
