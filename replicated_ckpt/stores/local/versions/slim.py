"""Slimming: a published version loses its optimizer. It stays the same save, with a smaller metadata and manifest.

The rename of the smaller manifest is the change. Before it the version is full. After it the optimizer's files belong
to no version. The full metadata has a second name from before the rename until the files are removed. So it marks a
slimming that a crash interrupted, and the next start or round completes it.
"""

from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    RECYCLED_DIR,
    STAGING_DIR,
    check_checkpoint_id,
    version_metadata_name,
)
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ManifestInvalid
from replicated_ckpt.stores.files.durable import fsync_directory, name_small_file, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_there
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.directories.looked import Looked
from replicated_ckpt.stores.local.versions.readers import unread
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles, write_with_room


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
        # A restart completes its publication with the manifest that is staged, the full one.
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
    """Durably gives the full metadata its second name, and the smaller one the first."""
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
    # The mark goes last: without it nothing removes files that a power loss brings back, to here from the pool, too.
    for changed in (directory, catalog.root / RECYCLED_DIR):
        if is_directory(changed):
            fsync_directory(changed)
    failpoints.reach("slim.dropped")
    (directory / version_metadata_name(save_id)).unlink(missing_ok=True)
