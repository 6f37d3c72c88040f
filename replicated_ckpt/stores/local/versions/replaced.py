"""Replaced versions: what had a checkpoint's name before a newer save took it, kept until the newer one is seen whole.

And the lock of readers of a version: it is not removed while one of them holds it.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from replicated_ckpt.core.layout import REPLACED_DIR, STAGING_DIR, ShardName
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.settlement import Answer, may_publish
from replicated_ckpt.errors import ManifestInvalid, SaveSuperseded, StoreUnavailable
from replicated_ckpt.stores.files.durable import (
    SHORTAGES,
    fsync_directory,
    make_directories,
    remove_tree,
    translate_errors,
)
from replicated_ckpt.stores.files.existence import is_directory, is_there
from replicated_ckpt.stores.files.locks import HeldLock, exclusive
from replicated_ckpt.stores.files.renames import exchange
from replicated_ckpt.stores.local.directories.catalog import Catalog, read_believed
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.versions.others import give_back_others

log = logging.getLogger(__name__)

LOOK_WITHIN_S = 1.0
"""So long a question waits for names that are being moved: a load may wait for the answer."""
_MOVES_MAX = 5
"""So often a version may be moved while a reader locks it; it is moved once, when a newer save replaces it."""


def check_order(manifest: Manifest, before: Manifest | None, intent: Intent) -> None:
    """Of one lineage the newer save has the name, on whatever path it is published.

    Raises:
        SaveSuperseded
    """
    if before is None:
        return
    if not may_publish(manifest.version, before.version, intent.replaces):
        raise SaveSuperseded(
            f"Save {manifest.save_id} of {manifest.checkpoint_id!r} (lineage {manifest.lineage or 'none'}, sequence "
            f"{manifest.sequence}) is not published: save {before.save_id} (lineage {before.lineage or 'none'}, sequence "
            f"{before.sequence}) has the name."
        )


def replaced_path(root: Path, before: Manifest | None, save_id: str) -> Path:
    """Where the version goes that save `save_id` replaces. One whose manifest is not believed goes by that save.

    If such a one has the place of `before`, which had replaced it, it goes by the newer save from now on.
    """
    directory = root / REPLACED_DIR
    make_directories(directory, root)
    path = directory / (save_id if before is None else before.save_id)
    there = read_believed(path)
    if before is not None and is_directory(path) and (there is None or there.save_id != before.save_id):
        path.rename(directory / save_id)
    return path


def look_again(catalog: Catalog, save_id: str) -> Answer:
    """What becomes of a save that was found nowhere: a version has no name for an instant while a newer one takes it.

    So it is looked for under the lock of the store, and where a crash in that instant may have left it.

    Raises:
        StoreUnavailable: names are being moved for longer than is waited for. StoreError
    """
    staging = catalog.root / STAGING_DIR
    with translate_errors(str(catalog.root), "look for", save_id), exclusive(staging, LOOK_WITHIN_S):
        if is_directory(staging / save_id):
            return Answer.STAGED
        if catalog.checkpoint_of(save_id) is not None:
            return Answer.PUBLISHED
        is_left = any(left is not None and left.save_id == save_id for left in map(read_believed, staging.glob("*")))
        return Answer.PUBLISHED if is_left else Answer.ABSENT


def lock_version(catalog: Catalog, checkpoint_id: str, save_id: str) -> HeldLock | None:
    """Keeps a version from being removed, wherever it is moved, until the lock is released, or this process has ended.

    None: it is not here; or its files may be read, and its directory cannot, or a process was stopped that replaces it.
    """
    with translate_errors(str(catalog.root), "lock", checkpoint_id):
        for _ in range(_MOVES_MAX):
            try:
                directory = catalog.directory_of(checkpoint_id, save_id)
                if directory is None:
                    return None
                fd = os.open(catalog.root / directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except ManifestInvalid:
                return None
            except OSError as exc:
                if exc.errno in SHORTAGES:
                    raise
                return None
            lock = HeldLock(fd)
            try:
                lock.wait(catalog.root / directory, shared=True)
                if _is_there(fd, catalog, checkpoint_id, save_id):
                    return lock
            except StoreUnavailable as exc:  # what is open stays readable
                log.warning("%s can be replaced while it is read: %s", checkpoint_id, exc)
                return None
            except BaseException:
                lock.release()
                raise
            lock.release()  # it was moved, or is being removed, between the look and the lock
    return None


def _is_there(fd: int, catalog: Catalog, checkpoint_id: str, save_id: str) -> bool:
    """Whether the directory behind `fd` is where the version lies now."""
    try:
        directory = catalog.directory_of(checkpoint_id, save_id)
        return directory is not None and os.path.samestat(os.fstat(fd), (catalog.root / directory).stat())
    except (ManifestInvalid, OSError):
        return False


@contextlib.contextmanager
def unread(directory: Path) -> Iterator[bool]:
    """Whether no load reads the version in this directory; then none begins to until the block has moved it.

    An agent that keeps it for a reader elsewhere counts as a reader.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    with HeldLock(fd) as lock:
        yield lock.try_take()


def is_read(directory: Path) -> bool:
    """Whether a process reads the version in this directory, or an agent keeps it for a reader elsewhere."""
    with unread(directory) as is_free:
        return not is_free


def take_back(catalog: Catalog, save_id: str, staging: Path) -> None:
    """A version that was replaced here and is published again has its shards back."""
    if not catalog.is_replaced(save_id):
        return
    path = catalog.root / REPLACED_DIR / save_id
    _move_missing(path, staging, catalog.shard_sizes(f"{REPLACED_DIR}/{save_id}"))
    # Else a power loss could undo a move, one of before a kill, too, and not the removal.
    fsync_directory(staging)
    fsync_directory(path)
    manifest = catalog.manifest(f"{REPLACED_DIR}/{save_id}")
    give_back_others(catalog.root, path, manifest.checkpoint_id)
    remove_tree(path)


def take_back_missing(catalog: Catalog, manifest: Manifest, names: Collection[str], bad: Collection[str]) -> bool:
    """Moves these files out of `.replaced` to where the save has its name and lacks them; whether there was any.

    Those that are `bad` there, as of a copy that was cut off, change places. The rest stays until every shard is seen
    intact. Within `exclusive`.
    """
    published, final = catalog.find_manifest(manifest.checkpoint_id), catalog.root / manifest.checkpoint_id
    if published is None or published.save_id != manifest.save_id:
        return False
    path = catalog.root / REPLACED_DIR / manifest.save_id
    bad = [name for name in bad if name in names and is_there(final / name)]
    is_any = _move_missing(path, final, names)
    for name in bad:
        is_any |= exchange(path / name, final / name)
    if is_any:
        fsync_directory(final)
        fsync_directory(path)
    return is_any


def _move_missing(path: Path, directory: Path, names: Collection[str]) -> bool:
    """Moves those of these files that the directory lacks; whether there was any."""
    missing = [name for name in names if not is_there(directory / name)]
    for name in missing:
        (path / name).rename(directory / name)
    return bool(missing)


def is_copied_by_hand(catalog: Catalog, checkpoint_id: str, before: Manifest | None) -> bool:
    """Whether what has this name is a user's copy of a version that lies whole under its own name: it need not be kept."""
    if before is None or before.checkpoint_id == checkpoint_id:
        return False
    own = read_believed(catalog.root / before.checkpoint_id)
    if own is None or own.save_id != before.save_id:
        return False
    return catalog.shard_sizes(checkpoint_id).items() <= catalog.shard_sizes(own.checkpoint_id).items()


def lacks_kept_shards(catalog: Catalog, save_id: str) -> bool:
    """Whether a version that a user has put back, by hand, has shards in `.replaced` that do not lie whole under its name.

    The copy may have begun after the version was seen whole in `.replaced`, and go on.
    """
    if not catalog.is_replaced(save_id):
        return False
    manifest = catalog.manifest(f"{REPLACED_DIR}/{save_id}")
    wanted = {name: entry.size_bytes for name, entry in manifest.shards.items()}
    kept = catalog.shard_sizes(f"{REPLACED_DIR}/{save_id}").items() & wanted.items()
    return not kept <= catalog.shard_sizes(manifest.checkpoint_id).items()


def keep_replaced(root: Path, staging: Path, save_id: str, *, is_published: bool) -> bool:
    """Keeps what save `save_id` has replaced where a crash left that under the save's staged name; False if none did.

    What has no manifest that is believed can only be that if the save is published.
    """
    before = read_believed(staging)
    if before is None and not (is_published and any(ShardName.parse(path.name) for path in staging.iterdir())):
        return False
    if before is not None and before.save_id == save_id:
        return False
    path = replaced_path(root, before, save_id)
    staging.rename(path)
    fsync_directory(path.parent)
    fsync_directory(staging.parent)
    return True


def holds_all_shards(directory: Path, manifest: Manifest) -> bool:
    """Whether every shard of a save lies there with the right size: then what it replaces need not wait for others."""
    return all(_size_of(directory / name) == entry.size_bytes for name, entry in manifest.shards.items())


def _size_of(path: Path) -> int | None:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
