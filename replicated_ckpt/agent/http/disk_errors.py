"""Which errors of a request are of this node's disk and not of its connection: those the sender is told."""

import errno
import ssl

from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.files.durable import SHORTAGES, store_error_of
from replicated_ckpt.stores.files.shortage import UNREADABLE

_OF_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.ENODEV,
    errno.ENXIO,
    errno.ENOENT,
    errno.ENOTDIR,
    *UNREADABLE,
    *SHORTAGES,
)


def disk_error_of(exc: OSError, op: str, target: str) -> StoreError | None:
    """What the sender of a request is told that has met it; None: the connection broke, and the sender hears nothing."""
    if isinstance(exc, ssl.SSLError) or exc.errno not in _OF_DISK:
        return None
    return store_error_of(exc, "the disk of this node", op, str(exc.filename or target))
