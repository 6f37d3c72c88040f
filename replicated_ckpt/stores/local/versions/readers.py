"""The lock of readers: a version is not removed while one of them holds it. It is on the file of its manifest."""

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
"""So long a question waits for a version that is being published or removed: a load may wait for the answer."""
_TRIES_MAX = 5
"""So often a manifest may be restored from another node while a reader locks it."""


def look_again(catalog: Catalog, save_id: str) -> Answer:
    """What becomes of a save that was found nowhere, looked for while nothing is published or removed here.

    Raises:
        StoreUnavailable: something is for longer than is waited for. StoreError
    """
    staging = catalog.staging
    with translate_errors(str(catalog.root), "look for", save_id), exclusive(staging, LOOK_WITHIN_S):
        if is_directory(staging / save_id):
            return Answer.STAGED
        return Answer.ABSENT if catalog.checkpoint_of(save_id) is None else Answer.PUBLISHED


def lock_version(catalog: Catalog, checkpoint_id: str, save_id: str) -> DescriptorLock | None:
    """Keeps a version from being removed until the lock is released, or this process has ended.

    None: it is not here; or its files may be read, and its manifest cannot, or a process was stopped that removes it; or
    the disk does not open it, which the load finds out, too.
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
            except StoreUnavailable as exc:  # what is open stays readable
                log.warning("%s can be removed while it is read: %s", checkpoint_id, exc)
                return None
            except BaseException:
                lock.release()
                raise
            lock.release()  # it was restored, or is being removed, between the look and the lock
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
    """Whether no load reads the version of this manifest; then none begins to until the block has marked it as gone.

    An agent that keeps it for a reader elsewhere counts as a reader.
    """
    try:
        fd = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    with DescriptorLock(fd) as lock:
        yield lock.try_take()


def is_read(manifest: Path) -> bool:
    """Whether a process reads the version of this manifest, or an agent keeps it for a reader elsewhere."""
    with unread(manifest) as is_free:
        return not is_free
