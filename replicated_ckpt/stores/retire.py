"""Retiring a committed checkpoint: it goes in one step, durably, and only then its files; a crash leaves all or nothing."""

from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import MANIFEST_NAME, STAGING_DIR, TRASH_DIR, is_checkpoint_id
from replicated_ckpt.core.manifest import decoded_manifest
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ObjectMissing
from replicated_ckpt.stores.catalog import Catalog
from replicated_ckpt.stores.durable import exclusive, make_directories, remove_moved, translated


def retire(root: Path, checkpoint_id: str, save_id: str) -> bool:
    """Removes a committed checkpoint; False, and nothing changed, if it is not here or is of another save by now.

    At every instant, and after a crash at any point, the checkpoint is there with all its files, or it is no checkpoint.
    Files of it that are open stay readable.

    Raises:
        ConfigInvalid: no checkpoint id. StoreError
    """
    if not is_checkpoint_id(checkpoint_id):
        raise ConfigInvalid(f"{checkpoint_id[:200]!r} is no checkpoint id.")
    final, staging = root / checkpoint_id, root / STAGING_DIR
    with translated(str(root), "retire", checkpoint_id):
        make_directories(staging, root)
        with exclusive(staging):
            if not _is_of(root, checkpoint_id, save_id):
                return False
            trash = root / TRASH_DIR / save_id
            trash.parent.mkdir(exist_ok=True)
            remove_moved(trash, final.parent, staging)
            final.rename(trash)
            failpoints.reach("retire.trashed")
            remove_moved(trash, final.parent)
    return True


def _is_of(root: Path, checkpoint_id: str, save_id: str) -> bool:
    try:
        manifest = Catalog(root).manifest(checkpoint_id)
    except (ObjectMissing, ManifestInvalid):
        return False
    return (manifest.save_id, manifest.checkpoint_id) == (save_id, checkpoint_id)


def origins(root: Path) -> list[Path]:
    """The directories out of which what lies in the trash has come, as far as its manifests tell.

    They are fsynced before it is removed. One whose manifest is gone was being removed already.
    """
    found = set()
    for path in (root / TRASH_DIR).glob(f"*/{MANIFEST_NAME}"):
        try:
            found.add((root / decoded_manifest(path.read_bytes(), str(path)).checkpoint_id).parent)
        except (OSError, ManifestInvalid):
            continue
    return [directory for directory in sorted(found) if directory.is_dir()]
