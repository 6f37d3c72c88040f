"""The link between a store on a disk and its tier in memory. Ranks record it in both stores, so that commands find
both.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.local.store import LocalStore

NAME = "tiers.json"
_MEMORY, _DISK = "memory", "disk"


def note_memory_tier(store: LocalStore, tier: Path) -> None:
    """Records in both stores that `tier` is this store's memory tier, for `find_memory_tier` and `find_other_disk`."""
    for noting, told in ((store, {_MEMORY: str(tier)}), (LocalStore(tier), {_DISK: str(store.root)})):
        path = noting.agent_directory() / NAME
        with translate_errors(str(noting.root), "note", NAME):
            known = _read(noting)
            if not told.items() <= known.items():
                write_file(path, json.dumps({**known, **told}).encode(), 0o600)


def find_memory_tier(store: LocalStore) -> Path | None:
    """The root of the last memory tier that ranks used with this store; it may have been removed. None: they used none.

    Raises:
        StoreDenied: another user can have written the record.
    """
    root = _read(store).get(_MEMORY)
    return None if root is None else Path(root)


def find_other_disk(tier: LocalStore, store: LocalStore) -> Path | None:
    """The root of another store that uses `tier` as its memory tier; None: there is none, or it uses another tier by now.

    Raises:
        StoreDenied: another user can have written the record. OSError: the root cannot be looked at.
    """
    disk = _read(tier).get(_DISK)
    if disk is None or find_memory_tier(LocalStore(root := Path(disk))) != tier.root:
        return None
    # The same store may be reached by another path, as through a link.
    return None if is_there(store.root) and root.samefile(store.root) else root


def _read(store: LocalStore) -> Mapping[str, str]:
    """The recorded roots by kind of tier; empty without a valid record."""
    try:
        told = json.loads(read_private(store.root_agent_directory() / NAME))
        return {str(kind): str(root) for kind, root in told.items()}
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError, AttributeError):
        return {}
