"""Whether a save may use a checkpoint id under a root: it depends on the files there, and the versions that it would
replace.
"""

import os
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.errors import CheckpointExists, ConfigInvalid
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_link, is_there, leads_out
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.looked import Looked

_USE_ANOTHER = "Use another id; overwrite=True does not help."
_MOVE_AWAY = "Use another id, or move that directory away on every node."


def check_decidable(root: Path, intent: Intent) -> None:
    """Checks, right before the decision, that the id of a save without overwrite is still free.

    After the decision only the order of saves counts, because other nodes may have published this one.

    Raises:
        CheckpointExists: another save was faster. ConfigInvalid, StoreError
    """
    if intent.checkpoint_id:
        with translate_errors(str(root), "decide", intent.save_id):
            check_replaceable(root, intent.checkpoint_id, intent)


def check_replaceable(root: Path, checkpoint_id: str, intent: Intent, *, gives_way: bool = False) -> None:
    """Refuses to replace a checkpoint without overwrite, and an id that cannot be a directory of the root.

    A directory without files of a checkpoint may be used; other files in it stay. `gives_way`: an existing checkpoint is
    no reason to refuse, since the order decides.

    Raises:
        CheckpointExists, ConfigInvalid
    """
    final = root / checkpoint_id
    if leads_out(root, checkpoint_id):
        raise ConfigInvalid(f"{checkpoint_id!r} leads outside {root} by a symbolic link.", _USE_ANOTHER)
    if is_link(final):
        raise ConfigInvalid(f"{final} is a symbolic link; it is not replaced.", _MOVE_AWAY)
    if not is_there(final):
        return
    if not is_directory(final):
        raise ConfigInvalid(f"{final} is not a directory; it is not replaced.", _MOVE_AWAY)
    if holds_checkpoint(final) and not (intent.overwrite or gives_way):
        raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {root}.")


def holds_checkpoint(directory: Path) -> bool:
    """Whether any file of a checkpoint lies there, of this package or of stock torch, complete or not."""
    try:
        return Looked("", os.scandir(directory)).holds_checkpoint
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_named(catalog: Catalog, checkpoint_id: str) -> str | None:
    """The lineage of the published save; "" without a valid manifest, None without any file of a checkpoint."""
    manifest = catalog.find_manifest(checkpoint_id)
    if manifest is not None:
        return manifest.lineage
    return "" if holds_checkpoint(catalog.root / checkpoint_id) else None


def is_checkpoint(directory: Path) -> bool:
    return is_there(directory / METADATA_NAME) or is_there(directory / MANIFEST_NAME)
