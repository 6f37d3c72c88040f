"""May a save take a name under a root: what is there already, and what would be replaced."""

import os
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.errors import CheckpointExists, ConfigInvalid
from replicated_ckpt.stores.files.containment import leads_out
from replicated_ckpt.stores.local.intent import Intent

_USE_ANOTHER = "Use another id; overwrite=True does not help."
_MOVE_AWAY = "Use another id, or move that directory away on every node."


def check_replaceable(root: Path, checkpoint_id: str, intent: Intent) -> None:
    """Refuses to replace a checkpoint unless asked to, and anything else ever.

    An adoption may replace a directory that has no manifest and holds nothing but plain files, all of which it keeps.

    Raises:
        CheckpointExists, ConfigInvalid
    """
    final = root / checkpoint_id
    if leads_out(root, checkpoint_id):
        raise ConfigInvalid(f"{checkpoint_id!r} leads out of {root} by a symbolic link.", _USE_ANOTHER)
    for parent in list(final.relative_to(root).parents)[:-1]:
        if (root / parent / METADATA_NAME).exists():
            raise CheckpointExists(f"{checkpoint_id!r} would lie inside the checkpoint {str(parent)!r}.", _USE_ANOTHER)
    if not final.exists():
        return
    if intent.adopts:
        _check_adoptable(final)
        return
    if not (final / METADATA_NAME).exists() and not (final / MANIFEST_NAME).exists():
        raise CheckpointExists(f"{final} exists and is no checkpoint; it is not replaced.", _MOVE_AWAY)
    if not intent.overwrite:
        raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {root}.")


def _check_adoptable(final: Path) -> None:
    if (final / MANIFEST_NAME).exists():
        raise CheckpointExists(
            f"{final} has a manifest: it is a checkpoint of this package and is not adopted.",
            "Nothing is left to adopt; `replicated-ckpt verify` reads it.",
        )
    for entry in os.scandir(final):
        if not entry.is_file(follow_symlinks=False):
            raise ConfigInvalid(
                f"{entry.path} is no plain file: a checkpoint with directories or links in it is not adopted.",
                "Move it out of the checkpoint's directory, then repair again. It loads as it is.",
            )
