"""Files of others in a checkpoint's directory (a tokenizer, a `config.json`): they outlive every version of the checkpoint.

A version is replaced or removed by renaming whole directories. So what is not ours moves to the directory that has the
checkpoint's name: at once where names are exchanged, and before the directory that it lay in is removed. A crash between
the two leaves it in the staging area or in the trash, whence the next settling or start gives it back.
"""

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.core.layout import (
    QUARANTINE_DIR,
    REPLACED_DIR,
    is_checkpoint_file,
    is_checkpoint_id,
    is_save_id,
)
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    make_directories,
    remove_moved,
    remove_tree,
    write_file,
)
from replicated_ckpt.stores.files.existence import is_directory, is_name_taken
from replicated_ckpt.stores.files.renames import rename_if_free
from replicated_ckpt.stores.local.directories.catalog import read_believed

log = logging.getLogger(__name__)

_BROKEN_OFF = re.compile(r"(.+?)(\.part|\.[0-9]+\.tmp)")


def is_broken_off(name: str) -> bool:
    """Whether it is what a process left of a checkpoint's file when it died while it wrote it."""
    match = _BROKEN_OFF.fullmatch(name)
    return match is not None and is_checkpoint_file(match[1])


def others_in(directory: Path) -> Iterator["os.DirEntry[str]"]:
    """What lies there and is no part of a checkpoint."""
    for entry in list(os.scandir(directory)):
        if not is_checkpoint_file(entry.name) and not is_broken_off(entry.name):
            yield entry


def bring_others(root: Path, final: Path, staging: Path) -> None:
    """Prepares a staged save for its publication: what broke off goes, and others' files are there under both names.

    What cannot have a second name is moved once the new version has the checkpoint's name.
    """
    remove_broken_off(staging)
    if is_directory(final):
        with contextlib.suppress(OSError):
            link_others(root, final, staging)


def remove_broken_off(directory: Path) -> None:
    """Removes what was left of files that were begun, in a save that needs no more of them."""
    for path in list(directory.iterdir()):
        if is_broken_off(path.name):
            path.unlink(missing_ok=True)


def link_others(root: Path, directory: Path, staging: Path) -> None:
    """Gives others' files a second name in the staged save, as they are now. Directories have one name: they move later.

    Raises:
        OSError: the file system cannot.
    """
    for entry in others_in(directory):
        if entry.is_dir(follow_symlinks=False):
            continue
        path, target = Path(entry.path), staging / entry.name
        if is_name_taken(target) and not _is_same(path, target):
            _set_aside(root, target)
        if not is_name_taken(target):
            os.link(path, target, follow_symlinks=False)


def move_others(root: Path, source: Path, target: Path) -> None:
    """Moves what is not ours from one version's directory to another's, durably. May be done again.

    A second name of what lies at the target goes. Where something else has the name there, the one from `source` is kept
    in the quarantine.
    """
    moved = list(others_in(source))
    for entry in moved:
        path, place = Path(entry.path), target / entry.name
        if rename_if_free(path, place):
            continue
        if _is_same(path, place):
            path.unlink()
        else:
            _set_aside(root, path)
    if moved:
        fsync_directory(target)
        fsync_directory(source)


def give_back_others(root: Path, directory: Path, checkpoint_id: str) -> None:
    """Moves what is not ours out of a directory that is about to be removed, to where its checkpoint is or was.

    Where that is not known, or it cannot lie there, it is kept in the quarantine.
    """
    others = list(others_in(directory))
    if others and is_checkpoint_id(checkpoint_id):
        try:
            make_directories(root / checkpoint_id, root)
            move_others(root, directory, root / checkpoint_id)
        except OSError as exc:
            log.warning("what is not ours in %s goes to the quarantine, as it cannot go back: %s", directory, exc)
        others = list(others_in(directory))
    for entry in others:
        _set_aside(root, Path(entry.path))


def give_back_replaced(root: Path, save_id: str, checkpoint_id: str) -> None:
    """The same of a version that is kept, if it is: a crash right after it was replaced left there what was to move on."""
    path = root / REPLACED_DIR / save_id
    if is_save_id(save_id) and is_directory(path):
        give_back_others(root, path, checkpoint_id)


def remove_carried(root: Path, directory: Path, checkpoint_id: str) -> None:
    """Removes a version that was carried from, if it is there. What came late and is not ours is given back.

    A part of it that came back under the name of the save that is staged would be no decision of that.
    """
    if is_directory(directory):
        give_back_others(root, directory, checkpoint_id)
        remove_tree(directory)


def remove_trash(root: Path, path: Path, *origins: Path) -> None:
    """Removes a version from the trash, if it is there, once its move there is durable. What is not ours is given back."""
    if is_directory(path):
        manifest = read_believed(path)
        give_back_others(root, path, "" if manifest is None else manifest.checkpoint_id)
        remove_moved(path, *origins)


def _is_same(first: Path, second: Path) -> bool:
    """Whether both are names of one file."""
    return os.path.samestat(first.lstat(), second.lstat())


def _set_aside(root: Path, path: Path) -> None:
    """Keeps in the quarantine what cannot have its name back, with a note of where it was."""
    folder = root / QUARANTINE_DIR / "others"
    make_directories(folder, root)
    target = folder / f"{path.name}.{uuid.uuid4().hex[:8]}"
    path.rename(target)
    write_file(target.with_name(f"{target.name}.json"), json.dumps({"was": str(path), "name": path.name}).encode())
