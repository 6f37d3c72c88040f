"""Removal of a version, and slimming: the removal of its optimizer alone.

A version is removed if the policy retires it, if a newer save that was seen whole replaces it, or by hand. Its manifest is
renamed to a mark, which hides the version from every reader at once. Then its files are removed, and last the mark.

A slimmed version stays the same save, with a smaller metadata and manifest. The rename of the smaller manifest is the
change. Before it the version is full. After it the optimizer's files belong to no version. From before the rename until
these files are removed, the full metadata has a second name, which marks the slimming as incomplete.

After a crash the next start or round of the agent completes a removal or slimming from its mark.
"""

import contextlib
import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    RECYCLED_DIR,
    STAGING_DIR,
    check_checkpoint_id,
    gone_name,
    replaced_name,
    version_metadata_name,
)
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ObjectMissing
from replicated_ckpt.stores.files.durable import fsync_directory, name_small_file, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_there, read_plain
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.directories.looked import Looked
from replicated_ckpt.stores.local.versions.full_disk import write_with_room
from replicated_ckpt.stores.local.versions.readers import unread
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

log = logging.getLogger(__name__)


def retire(root: Path, checkpoint_id: str, save_id: str) -> bool:
    """Removes a committed save. Returns False, and changes nothing, if a load reads it, it is not here, or a user
    renamed it.

    Also removes recycled files: a user who removes a checkpoint by hand wants free space.

    At every instant, and after a crash at any instant, the checkpoint has all its files, or does not exist. Its open
    files stay readable. Users' files in its directory stay.

    Raises:
        ConfigInvalid: this is not a checkpoint id. StoreError
    """
    is_removed = _remove(root, checkpoint_id, save_id)
    with translate_errors(str(root), "remove", RECYCLED_DIR):
        RecycledFiles(root).drop()
    return is_removed


def recycle(root: Path, checkpoint_id: str, save_id: str) -> bool:
    """As `retire`, but moves the shards to the pool of recycled files, for the next save to overwrite."""
    return _remove(root, checkpoint_id, save_id, recycles=True)


def _remove(root: Path, checkpoint_id: str, save_id: str, *, recycles: bool = False) -> bool:
    check_checkpoint_id(checkpoint_id)
    catalog = Catalog(root)
    with translate_errors(str(root), "retire", checkpoint_id), exclusive(root / STAGING_DIR):
        try:
            # A directory that its user renamed or copied is the user's to remove.
            if catalog.manifest_of(checkpoint_id, save_id).checkpoint_id != checkpoint_id:
                return False
        except (ObjectMissing, ManifestInvalid):
            return False
        return remove_unread(catalog, checkpoint_id, save_id, recycles=recycles)


def remove_unread(catalog: Catalog, checkpoint_id: str, save_id: str, *, recycles: bool = False) -> bool:
    """Removes a version, published or replaced; False if a load reads it. The caller holds `exclusive`."""
    # Else the optimizer's files would stay: no manifest names them.
    finish_slimming(catalog, catalog.look(checkpoint_id))
    if not _mark_as_gone(catalog, checkpoint_id, save_id):
        return False
    finish_removal(catalog, checkpoint_id, save_id, recycles=recycles)
    return True


def remove_replaced(catalog: Catalog, checkpoint_id: str, save_ids: Sequence[str]) -> None:
    """Removes versions that a staged save has just replaced. Versions that a load reads stay.

    The marks need not be durable before the files are removed: after a power loss the staged save is published again,
    and this removal is repeated. It also completes interrupted removals. The caller holds `exclusive`.
    """
    for save_id in save_ids:
        _mark_as_gone(catalog, checkpoint_id, save_id)
    for save_id in catalog.look(checkpoint_id).gone:
        _remove_files(catalog, checkpoint_id, save_id)


def _mark_as_gone(catalog: Catalog, checkpoint_id: str, save_id: str) -> bool:
    """Renames the manifest of a version to its mark, which hides it from readers; False if a load reads it."""
    directory = catalog.root / checkpoint_id
    path = catalog.manifest_path(checkpoint_id, save_id)
    with unread(path) as is_unread:
        if not is_unread:
            return False
        with contextlib.suppress(FileNotFoundError):
            path.rename(directory / gone_name(save_id))
    # A second name, from an interrupted publication, would revive it.
    (directory / replaced_name(save_id)).unlink(missing_ok=True)
    failpoints.reach("retire.gone")
    return True


def finish_removals(catalog: Catalog, looked: Looked) -> None:
    """Completes interrupted removals in one directory. The caller holds `exclusive`."""
    for save_id in looked.gone:
        finish_removal(catalog, looked.checkpoint_id, save_id)


def finish_removal(catalog: Catalog, checkpoint_id: str, save_id: str, *, recycles: bool = False) -> None:
    """Removes a version whose manifest is marked as gone. May be repeated."""
    fsync_directory(catalog.root / checkpoint_id)  # else a power loss could bring the manifest back, and not the files
    _remove_files(catalog, checkpoint_id, save_id, recycles=recycles)


def _remove_files(catalog: Catalog, checkpoint_id: str, save_id: str, *, recycles: bool = False) -> None:
    """Removes the files of a version, then the mark, then an empty directory.

    If the mark's manifest is damaged, it removes the files that no other manifest names.
    """
    directory = catalog.root / checkpoint_id
    mark = directory / gone_name(save_id)
    gone = _read_gone(mark)
    (directory / version_metadata_name(save_id)).unlink(missing_ok=True)
    looked = catalog.look(checkpoint_id)
    names = catalog.list_unclaimed(looked) if gone is None else catalog.list_only_of(looked, gone)
    if not looked.has_manifest and not set(looked.shards).difference(names, catalog.list_claimed(checkpoint_id)):
        # If other shards are here, `.metadata` belongs to a later save by stock torch.
        (directory / METADATA_NAME).unlink(missing_ok=True)
    if recycles:
        RecycledFiles(catalog.root).put_files(directory, names)
    failpoints.reach("retire.recycled")
    for name in names:
        (directory / name).unlink(missing_ok=True)
    fsync_directory(directory)  # else a power loss could leave files without a mark, which nothing removes
    mark.unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError as exc:
        # The user's own files, a mount point, or a parent without write permission keep the directory.
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY, errno.EACCES, errno.EPERM):
            raise


def _read_gone(path: Path) -> Manifest | None:
    try:
        return decode_manifest(read_plain(path, MANIFEST_BYTES_MAX + 1), str(path))
    except (FileNotFoundError, ManifestInvalid):
        return None


def renamed_refusal(checkpoint_id: str, saved_as: str, root: Path) -> ConfigInvalid:
    """The error for the removal of a directory that a user has renamed, or copied under another name."""
    return ConfigInvalid(
        f"{checkpoint_id!r} is a directory that was renamed or copied by hand from {saved_as!r}: no command "
        "removes it.",
        f"`rm -r {quote(str(root / checkpoint_id))}`, on each node that has it. A node that still has it after "
        "its agent's --lost-after-s (30 s) copies it to the others again.",
    )


def slim(root: Path, checkpoint_id: str, save_id: str, *, recycles: bool = False) -> bool:
    """Removes the optimizer of a published save.

    Returns False, and changes nothing, in these cases: it has no optimizer, a load reads it, it is not published here
    under its own name, or its publication is not complete.

    At every instant, and after a crash at any instant, the checkpoint is full or has exactly its weights. Open files
    stay readable. `recycles`: the files go to the pool, for the next save to overwrite.

    Raises:
        ConfigInvalid: this is not a checkpoint id. ObjectCorrupt: its metadata is damaged; the checkpoint is full.
            StoreError
    """
    check_checkpoint_id(checkpoint_id)
    catalog, directory = Catalog(root), root / checkpoint_id
    with translate_errors(str(root), "slim", checkpoint_id), exclusive(root / STAGING_DIR):
        finish_slimming(catalog, catalog.look(checkpoint_id))
        full = catalog.find_manifest(checkpoint_id)
        if full is None or (full.checkpoint_id, full.save_id) != (checkpoint_id, save_id) or full.weights is None:
            return False
        # Its publication is not complete: a restart would repeat it with the staged manifest, the full one.
        if is_directory(root / STAGING_DIR / save_id):
            return False
        with unread(directory / MANIFEST_NAME) as is_unread:
            if not is_unread:
                return False
            _describe(root, full)
            failpoints.reach("slim.described")
            write_with_room(root, directory / MANIFEST_NAME, full.slimmed().encode())
        failpoints.reach("slim.named")
        finish_slimming(catalog, catalog.look(checkpoint_id), recycles=recycles)
    return True


def _describe(root: Path, full: Manifest) -> None:
    """Durably gives the full metadata its second name, and the smaller metadata the usual one."""
    directory = root / full.checkpoint_id
    with open_committed_save(root, full.checkpoint_id, full.save_id) as (version, _):
        raw = version.raw_metadata(full)
    smaller, slim = full.slim_metadata(raw), full.slimmed()
    if (len(smaller), crc32c(smaller)) != (slim.metadata_bytes, slim.metadata_crc32c):
        raise ManifestInvalid(f"The .metadata of {full.checkpoint_id!r} has no part for its weights alone.")
    own = directory / version_metadata_name(full.save_id)
    if not is_there(own):  # after a crash here `.metadata` may be the smaller one
        name_small_file(directory / METADATA_NAME, own)
        fsync_directory(directory)
    write_with_room(root, directory / METADATA_NAME, smaller)


def finish_slimming(catalog: Catalog, looked: Looked, *, recycles: bool = False) -> None:
    """Removes the files that an interrupted slimming of the published version has left. The caller holds `exclusive`."""
    save_id, names = catalog.find_left_by_slimming(looked)
    if not save_id:
        return
    directory = catalog.root / looked.checkpoint_id
    fsync_directory(directory)  # else a power loss could bring the full manifest back, and not the files
    if recycles:
        RecycledFiles(catalog.root).put_files(directory, names)
    for name in names:
        (directory / name).unlink(missing_ok=True)
    # The mark goes last: a power loss can bring files back, here or from the pool, and only the mark leads to them.
    for changed in (directory, catalog.root / RECYCLED_DIR):
        if is_directory(changed):
            fsync_directory(changed)
    failpoints.reach("slim.dropped")
    (directory / version_metadata_name(save_id)).unlink(missing_ok=True)
