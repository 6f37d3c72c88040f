"""Leases, by which the store tells whether a file is open elsewhere. Without them no file is recycled."""

import os
from pathlib import Path

import pytest

from replicated_ckpt.stores.local.versions.recycled import is_open_elsewhere


def skip_without_leases(directory: Path) -> None:
    """Skips the test on file systems without leases, such as overlayfs and NFS."""
    path = directory / "lease"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        if is_open_elsewhere(fd):
            pytest.skip("this file system has no leases: no file is recycled on it")
    finally:
        os.close(fd)
        path.unlink()
