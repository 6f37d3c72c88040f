"""Retiring a committed checkpoint: it goes in one step, durably, and only then its files; a crash leaves all or nothing."""

import logging
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import RECYCLED_DIR, STAGING_DIR, TRASH_DIR, check_checkpoint_id
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ObjectMissing
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    make_directories,
    make_directory,
    remove_moved,
    translate_errors,
)
from replicated_ckpt.stores.files.existence import is_directory
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.catalog import Catalog, read_believed
from replicated_ckpt.stores.local.versions.others import remove_trash
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.local.versions.replaced import unread

log = logging.getLogger(__name__)


def retire(root: Path, checkpoint_id: str, save_id: str) -> bool:
    """Removes a committed checkpoint; False, and nothing changed, if it is read, not here, or of another save by now.

    Recycled files go, too: who removes a checkpoint by hand wants the room.

    At every instant, and after a crash at any point, the checkpoint is there with all its files, or it is no checkpoint.
    Files of it that are open stay readable. What is not ours in its directory stays there.

    Raises:
        ConfigInvalid: no checkpoint id. StoreError
    """
    is_removed = _remove(root, checkpoint_id, save_id)
    with translate_errors(str(root), "remove", RECYCLED_DIR):
        RecycledFiles(root).drop()
    return is_removed


def recycle(root: Path, checkpoint_id: str, save_id: str) -> bool:
    """As `retire`, and the next save writes its shards over the checkpoint's files, which wait for that in the pool."""
    return _remove(root, checkpoint_id, save_id, recycles=True)


def _remove(root: Path, checkpoint_id: str, save_id: str, *, recycles: bool = False) -> bool:
    check_checkpoint_id(checkpoint_id)
    staging = root / STAGING_DIR
    with translate_errors(str(root), "retire", checkpoint_id):
        make_directories(staging, root)
        with exclusive(staging):
            place = _place_of(root, checkpoint_id, save_id)
            return place is not None and remove_unread(root, place, save_id, recycles=recycles)


def remove_unread(root: Path, place: Path, save_id: str, *, recycles: bool = False) -> bool:
    """Removes the directory of a version by way of the trash; False: it is read. Within `exclusive`."""
    trash = root / TRASH_DIR / save_id
    make_directory(trash.parent)
    remove_trash(root, trash, place.parent, root / STAGING_DIR)
    with unread(place) as is_unread:
        if not is_unread:
            return False
        place.rename(trash)
    failpoints.reach("retire.trashed")
    if recycles:  # once the move is durable: else a power loss could give the checkpoint its name back, written over
        for directory in (place.parent, trash.parent):
            fsync_directory(directory)
        RecycledFiles(root).put(trash)
    remove_trash(root, trash, place.parent)
    return True


def _place_of(root: Path, checkpoint_id: str, save_id: str) -> Path | None:
    """Where the save lies, published or replaced; None: not here, or in a directory that a user has renamed."""
    catalog = Catalog(root)
    try:
        directory = catalog.directory_of(checkpoint_id, save_id)
        if directory is None or catalog.manifest(directory).checkpoint_id != checkpoint_id:
            return None
    except (ObjectMissing, ManifestInvalid):
        return None
    return root / directory


def renamed_refusal(checkpoint_id: str, saved_as: str, root: Path) -> ConfigInvalid:
    """Why nothing removes a directory that a user has renamed, or copied under another name, and the way out."""
    return ConfigInvalid(
        f"{checkpoint_id!r} is a directory that was renamed, or copied by hand, from {saved_as!r}: no command removes it.",
        f"`rm -r {quote(str(root / checkpoint_id))}`, on each node that has it; what one of them still has after its "
        "agent's --lost-after-s (30 s) is brought back to the others.",
    )


def empty_trash(root: Path, origins: Sequence[Path]) -> None:
    """Removes what a crash has left in the trash, once it is sure to have left `origins` and its own places.

    The directory is there afterwards: on a full disk there may be no room to make it, and what is removed goes through it.
    """
    trash, left = root / TRASH_DIR, {*origins, *_origins(root)}
    for path in list(trash.glob("*")):
        try:
            remove_trash(root, path, *left)
        except OSError as exc:
            log.warning("%s stays in the trash for now: %s", path, exc)
            return
    remove_moved(trash, *left)
    make_directory(trash)


def _origins(root: Path) -> list[Path]:
    """The directories out of which what lies in the trash has come, as far as its manifests tell.

    They are fsynced before it is removed. One whose manifest is gone was being removed already.
    """
    manifests = map(read_believed, (root / TRASH_DIR).glob("*"))
    found = {(root / manifest.checkpoint_id).parent for manifest in manifests if manifest is not None}
    return [directory for directory in sorted(found) if is_directory(directory)]
