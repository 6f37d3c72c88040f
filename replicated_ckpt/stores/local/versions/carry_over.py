"""What goes along when a staged adoption replaces the directory that it was made from: nothing that lay there is lost."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, STAGING_DIR, ShardName
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import SaveAborted
from replicated_ckpt.stores.files.durable import hash_file, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_there
from replicated_ckpt.stores.files.plain import read_plain
from replicated_ckpt.stores.local.directories.committed import open_directory

Signature = list[int]


def carry_over(root: Path, manifest: Manifest, staging: Path) -> None:
    """Looks at the directory that an adoption is about to replace. May be done again.

    Shards that `.metadata` does not name are kept in the quarantine.

    Raises:
        SaveAborted: something has changed the checkpoint since it was staged; nothing is replaced.
    """
    final = root / manifest.checkpoint_id
    if not is_directory(final):
        return
    originals = _originals(root, manifest.save_id)
    for entry in list(os.scandir(final)):
        if entry.name == METADATA_NAME:
            wanted = manifest.metadata_bytes, manifest.metadata_crc32c
            if hash_file(Path(entry.path), wanted[0]) != wanted:
                raise _changed_error(entry.path)
        elif ShardName.parse(entry.name) is None:
            continue
        elif not is_there(staging / entry.name):
            why = "the checkpoint was adopted, and this file is none of the shards that were taken over"
            with open_directory(root, manifest.checkpoint_id) as directory:
                directory.set_aside(entry.name, why, stays=True)
        elif originals.get(entry.name) != signature(entry.stat(follow_symlinks=False)):
            raise _changed_error(entry.path)
    failpoints.reach("adopt.carried")


def set_changed_aside(root: Path, checkpoint_id: str, save_id: str) -> None:
    """Shards that were changed since they were staged go to the quarantine. For an adoption that is decided, and over.

    Other nodes may have published it, and what is staged may be the only copy: `carry_over` would refuse it for ever.
    Where another save has the name, as of a second adoption at that time, the shards that lie there are that save's.
    """
    final = root / checkpoint_id
    with translate_errors(str(root), "set aside", checkpoint_id):
        if is_there(final / MANIFEST_NAME):
            return
        there = {name: known for name, known in _originals(root, save_id).items() if is_there(final / name)}
        changed = [name for name, known in there.items() if known != signature(os.lstat(final / name))]
        if changed:
            with open_directory(root, checkpoint_id) as directory:
                for name in changed:
                    directory.set_aside(name, "it was changed while the checkpoint was being adopted")


def signature(status: os.stat_result) -> Signature:
    return [status.st_ino, status.st_mtime_ns, status.st_size]


def originals_path(root: Path, save_id: str) -> Path:
    """Beside the intent, which goes with it: which files the staged ones are copies of."""
    return root / STAGING_DIR / f"{save_id}.originals.json"


def _originals(root: Path, save_id: str) -> Mapping[str, Signature]:
    try:
        return dict(json.loads(read_plain(originals_path(root, save_id))))
    except (OSError, ValueError, TypeError):
        return {}


def _changed_error(path: str) -> SaveAborted:
    return SaveAborted(
        f"{path} was changed while the checkpoint was being adopted.", "It stays as it is: repair again."
    )
