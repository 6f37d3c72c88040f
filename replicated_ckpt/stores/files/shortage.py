"""What an error of reading a file says: nothing of it while the system reads no file at all, and of no other one."""

import errno
from pathlib import Path

from replicated_ckpt.stores.files.durable import SHORTAGES, store_error_of

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


def raise_shortage(exc: OSError, path: Path) -> None:
    """For what handles the error of reading `path`.

    Raises:
        StoreError: it is for want of descriptors or memory, which says nothing of this file.
    """
    if exc.errno in SHORTAGES:
        raise store_error_of(exc, str(path.parent), "read", path.name) from exc
