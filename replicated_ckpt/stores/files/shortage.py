"""Where a file that cannot be read counts as none: not while the system reads no file at all."""

from pathlib import Path

from replicated_ckpt.stores.files.durable import SHORTAGES, store_error_of


def raise_shortage(exc: OSError, path: Path) -> None:
    """For what handles the error of reading `path`.

    Raises:
        StoreError: it is for want of descriptors or memory, which says nothing of this file.
    """
    if exc.errno in SHORTAGES:
        raise store_error_of(exc, str(path.parent), "read", path.name) from exc
