"""May a save take a name under a root: what is there already, and what would be replaced."""

import os
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, PARTS_MAX, is_checkpoint_file
from replicated_ckpt.errors import CheckpointExists, ConfigInvalid
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_link, is_there, leads_out
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.versions.others import others_in

_ONE_EACH = (
    "An overwrite and the retention rename a checkpoint's whole directory, so no other checkpoint lies in it. "
    "Name series side by side, each in a directory of its own: run-model/step_10 and run-ema/step_10."
)

_USE_ANOTHER = "Use another id; overwrite=True does not help."
_MOVE_AWAY = "Use another id, or move that away on every node."


def check_decidable(root: Path, intent: Intent) -> None:
    """Right before a save is decided: one that may replace nothing finds its name still free.

    From its decision on it has its place by its order alone, as other nodes may have published it by then.

    Raises:
        CheckpointExists: another save was faster. ConfigInvalid, StoreError
    """
    if intent.checkpoint_id:
        with translate_errors(str(root), "decide", intent.save_id):
            check_replaceable(root, intent.checkpoint_id, intent)


def check_replaceable(root: Path, checkpoint_id: str, intent: Intent, *, gives_way: bool = False) -> None:
    """Refuses to replace a checkpoint unless asked to, and to put one into another.

    A directory that holds no checkpoint is none yet, whatever lies in it: that stays. `gives_way`: what has the name
    goes by their order.

    Raises:
        CheckpointExists, ConfigInvalid
    """
    final = root / checkpoint_id
    if leads_out(root, checkpoint_id):
        raise ConfigInvalid(f"{checkpoint_id!r} leads out of {root} by a symbolic link.", _USE_ANOTHER)
    for parent in list(final.relative_to(root).parents)[:-1]:
        if is_checkpoint(root / parent):
            raise ConfigInvalid(f"{checkpoint_id!r} would lie inside the checkpoint {str(parent)!r}.", _ONE_EACH)
    if is_link(final):
        raise ConfigInvalid(f"{final} is a symbolic link; it is not replaced.", _MOVE_AWAY)
    if not is_there(final):
        return
    if holds_checkpoint(final):
        if not (intent.overwrite or gives_way):
            raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {root}.")
    elif not is_directory(final):
        raise ConfigInvalid(f"{final} is no directory; it is not replaced.", _MOVE_AWAY)
    _check_others(root, final)


def holds_checkpoint(directory: Path) -> bool:
    """Whether any file of a checkpoint lies there: one of ours, or of stock torch, whole or not."""
    try:
        with os.scandir(directory) as entries:
            return any(is_checkpoint_file(entry.name) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_named(catalog: Catalog, checkpoint_id: str) -> str | None:
    """The lineage of the save that has a checkpoint's name; "" where no manifest tells, None where nothing of it lies."""
    manifest = catalog.find_manifest(checkpoint_id)
    if manifest is not None:
        return manifest.lineage
    return "" if holds_checkpoint(catalog.root / checkpoint_id) else None


def is_checkpoint(directory: Path) -> bool:
    return is_there(directory / METADATA_NAME) or is_there(directory / MANIFEST_NAME)


def _check_others(root: Path, final: Path) -> None:
    """What else lies in the directory goes along with it: no checkpoint is among it, and it can be moved."""
    for entry in others_in(final):
        if not entry.is_dir(follow_symlinks=False):
            continue
        if os.path.ismount(entry.path) or not os.access(entry.path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigInvalid(
                f"{entry.path} cannot be moved, as it is mounted or may not be read and written: it could not stay with "
                "the checkpoint.",
                "Move it out of the checkpoint's directory, or use another id.",
            )
        inside = _checkpoint_below(Path(entry.path), 1)
        if inside is not None:
            found = inside.relative_to(root)
            raise ConfigInvalid(
                f"{str(final.relative_to(root))!r} would hold the checkpoint {str(found)!r}.", _ONE_EACH
            )


def _checkpoint_below(directory: Path, depth: int) -> Path | None:
    if is_checkpoint(directory):
        return directory
    below = [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    found = (
        _checkpoint_below(path, depth + 1) for path in below if depth < PARTS_MAX and os.access(path, os.R_OK | os.X_OK)
    )
    return next((path for path in found if path is not None), None)
