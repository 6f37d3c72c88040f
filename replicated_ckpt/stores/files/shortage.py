"""What an error of reading a file says: nothing of it while the system reads no file at all, and of no other one."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.errors import ObjectCorrupt, StoreError
from replicated_ckpt.stores.files.durable import SHORTAGES, store_error_of, translate_errors

UNREADABLE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG)
"""What is said of one place on a disk. Source: ext4 and XFS say the last two of what fails their own checksums."""


def find_unreadable(exc: BaseException) -> OSError | None:
    """The system's error, if it says that the disk has lost what lies at one place, or that another thing lies there.

    What lies elsewhere is as it was.
    """
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in UNREADABLE else None


def is_unreadable(exc: BaseException) -> bool:
    """Whether it says that, whatever it is raised as."""
    return find_unreadable(exc) is not None


@contextlib.contextmanager
def translate_read_errors(store: str, op: str, key: str) -> Iterator[None]:
    """As `translate_errors`; but bytes that the disk has lost are damaged ones: those around them may be as they were.

    Raises:
        ObjectCorrupt: the block has met such bytes. StoreError
    """
    try:
        with translate_errors(store, op, key):
            yield
    except StoreError as exc:
        if not is_unreadable(exc):
            raise
        raise ObjectCorrupt(store, op, key, exc.detail, exc.hint) from exc.__cause__


def raise_shortage(exc: Exception, path: Path) -> None:
    """For what handles the error of reading `path`. Another one than the system's passes.

    Raises:
        StoreError: it is for want of descriptors or memory, which says nothing of this file.
    """
    if isinstance(exc, OSError) and exc.errno in SHORTAGES:
        raise store_error_of(exc, str(path.parent), "read", path.name) from exc
