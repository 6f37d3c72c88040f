"""The readers' lock, on the file of a version's manifest: no version is removed while a reader holds it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.errors import ManifestInvalid, ObjectMissing, StoreError, StoreUnavailable
from replicated_ckpt.stores.files.durable import SHORTAGES, translate_errors
from replicated_ckpt.stores.files.existence import is_directory
from replicated_ckpt.stores.files.locks import DescriptorLock, exclusive
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import open_committed_save

log = logging.getLogger(__name__)

LOOK_WITHIN_S = 1.0
"""Longest wait for a publication or removal in progress: a load may wait for the answer."""
_TRIES_MAX = 5
"""Tries of a reader to lock a manifest that is replaced meanwhile, for example by a copy from another node."""


def look_again(catalog: Catalog, save_id: str) -> Answer:
    """The state of a save that a search without the lock did not find. Searches again, with publications and removals
    locked out.

    Raises:
        StoreUnavailable: a publication or removal takes longer than LOOK_WITHIN_S. StoreError
    """
    staging = catalog.staging
    with translate_errors(str(catalog.root), "look for", save_id), exclusive(staging, LOOK_WITHIN_S):
        # A wrong answer "absent" can make another node remove the only copy of a shard (I1).
        if is_directory(staging / save_id):
            return Answer.STAGED
        return Answer.ABSENT if catalog.checkpoint_of(save_id) is None else Answer.PUBLISHED


def lock_version(catalog: Catalog, checkpoint_id: str, save_id: str) -> DescriptorLock | None:
    """Prevents the removal of a version until the lock is released, or this process ends.

    None: the version is not here, its manifest cannot be opened, or a stopped process is removing it. Its files may still
    be readable.
    """
    with translate_errors(str(catalog.root), "lock", checkpoint_id):
        for _ in range(_TRIES_MAX):
            try:
                with open_committed_save(catalog.root, checkpoint_id, save_id) as (version, _manifest):
                    fd = version.open(MANIFEST_NAME)
            except (StoreError, ManifestInvalid) as exc:
                if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in SHORTAGES:
                    raise
                return None
            lock = DescriptorLock(fd)
            path = catalog.root / checkpoint_id
            try:
                lock.wait(path, shared=True)
                if _is_there(fd, catalog, checkpoint_id, save_id):
                    return lock
            except StoreUnavailable as exc:  # open files stay readable after a removal
                log.warning("%s can be removed while it is read: %s", checkpoint_id, exc)
                return None
            except BaseException:
                lock.release()
                raise
            lock.release()  # its manifest was replaced or removed between open and lock
    return None


def _is_there(fd: int, catalog: Catalog, checkpoint_id: str, save_id: str) -> bool:
    """Whether the file behind `fd` is the version's manifest now."""
    try:
        with open_committed_save(catalog.root, checkpoint_id, save_id) as (version, _):
            found = version.open(MANIFEST_NAME)
    except (ObjectMissing, ManifestInvalid):
        return False
    try:
        return os.path.samestat(os.fstat(fd), os.fstat(found))
    finally:
        os.close(found)


@contextlib.contextmanager
def unread(manifest: Path) -> Iterator[bool]:
    """True if no load reads the version of this manifest. Then no load can begin to read it before the block ends.

    An agent that pins the version for a remote reader counts as a reader.
    """
    try:
        fd = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    with DescriptorLock(fd) as lock:
        yield lock.try_take()


def is_read(manifest: Path) -> bool:
    """Whether a process reads the version of this manifest, or an agent pins it for a remote reader."""
    with unread(manifest) as is_free:
        return not is_free
