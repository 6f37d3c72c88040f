"""Which directory in memory is the tier of a store on a disk: noted there by the ranks, for commands that look there."""

import os
from pathlib import Path

from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.local.store import LocalStore

_NAME = "memory-tier"


def note_memory_tier(store: LocalStore, tier: Path) -> None:
    """`find_memory_tier` of this store gives this directory from now on.

    Raises:
        StoreDenied, StoreError
    """
    path, raw = store.agent_directory() / _NAME, os.fsencode(tier)
    with translate_errors(str(store.root), "note", _NAME):
        if not is_there(path) or read_private(path) != raw:
            write_file(path, raw, 0o600)


def find_memory_tier(store: LocalStore) -> Path | None:
    """The root of the last memory tier that ranks have used with this store; it may be gone. None: there was none.

    Raises:
        StoreDenied: another user can have written it.
    """
    try:
        return Path(os.fsdecode(read_private(store.root_agent_directory() / _NAME)))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
