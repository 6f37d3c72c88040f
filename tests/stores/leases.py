"""Where files are recycled: on file systems that tell whether anything has a file open."""

import os
from pathlib import Path

import pytest

from replicated_ckpt.stores.local.versions.recycled import is_open_elsewhere


def skip_without_leases(directory: Path) -> None:
    """Skips the test where nothing is recycled: on overlayfs, as of a container, and on NFS."""
    path = directory / "lease"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        if is_open_elsewhere(fd):
            pytest.skip("this file system does not tell whether a file is open: nothing is recycled on it")
    finally:
        os.close(fd)
        path.unlink()
