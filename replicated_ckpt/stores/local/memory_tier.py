"""Which directory in memory is the tier of a store on a disk: noted there by the ranks, for commands that look there."""

import os
from pathlib import Path

from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.local.store import LocalStore

_NAME, _DISK_NAME = "memory-tier", "disk"


def note_memory_tier(store: LocalStore, tier: Path) -> None:
    """`find_memory_tier` of this store gives this directory from now on, and `find_other_disk` of that this store."""
    for noting, name, root in ((store, _NAME, tier), (LocalStore(tier), _DISK_NAME, store.root)):
        path, raw = noting.agent_directory() / name, os.fsencode(root)
        with translate_errors(str(noting.root), "note", name):
            if not is_there(path) or read_private(path) != raw:
                write_file(path, raw, 0o600)


def find_memory_tier(store: LocalStore) -> Path | None:
    """The root of the last memory tier that ranks have used with this store; it may be gone. None: there was none.

    Raises:
        StoreDenied: another user can have written it.
    """
    return _read(store, _NAME)


def find_other_disk(tier: LocalStore, store: LocalStore) -> Path | None:
    """The root of another store than this one, whose memory tier this is: it is there, and names no other one since.

    Raises:
        StoreDenied: another user can have written it. OSError: it cannot be looked at.
    """
    root = _read(tier, _DISK_NAME)
    if root is None or find_memory_tier(LocalStore(root)) != tier.root:
        return None
    return None if is_there(store.root) and root.samefile(store.root) else root


def _read(store: LocalStore, name: str) -> Path | None:
    try:
        return Path(os.fsdecode(read_private(store.root_agent_directory() / name)))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
