"""Room for an agent on a full disk: without one, no command removes a checkpoint there."""

import contextlib
import os
from pathlib import Path

from replicated_ckpt.core.layout import RECYCLED_DIR, ROOM_NAME
from replicated_ckpt.stores.files.durable import is_full, translate_errors, write_all
from replicated_ckpt.stores.files.existence import closing_fd, is_there
from replicated_ckpt.stores.files.room import find_free_bytes, find_write_error
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

_SMALL_FILES_BYTES = 1 << 20
_KEPT_BYTES = 128 << 10
"""Reserved bytes: enough for an agent's small files and first log lines at its start, and for a removal."""
_KEPT_NAMES = (ROOM_NAME, f"{ROOM_NAME}.1")
"""Two files, so two inodes: a small file is replaced by a new one beside it, and the log may be new."""


def keep_room_to_start(root: Path) -> None:
    """Reserves that room in files, if the disk has it. `make_room_to_start` removes them on a full disk."""
    with contextlib.suppress(OSError):  # without the reserve everything works until the disk is full
        for name in _KEPT_NAMES:
            if not is_there(root / name):
                _fill(root / name, _KEPT_BYTES // len(_KEPT_NAMES))


def _fill(path: Path, size_bytes: int) -> None:
    """Raises OSError: the disk is full, and no file is left; or another process has just made the file."""
    with closing_fd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)) as fd:
        try:
            # Random bytes: a file system that compresses would store zeros in no room at all.
            write_all(fd, os.urandom(size_bytes))
        except OSError:
            # A partial file would take the last room of the disk without being a reserve.
            path.unlink()
            raise


def make_room_to_start(root: Path) -> None:
    """Removes recycled files and the reserve, if the disk has no room for an agent's small files.

    One of these is the record of a removal: a removal that frees the disk needs some room itself.
    """
    if lacks_room_to_start(root):
        with translate_errors(str(root), "make room in", RECYCLED_DIR):
            RecycledFiles(root).drop()
            for name in _KEPT_NAMES:
                (root / name).unlink(missing_ok=True)


def lacks_room_to_start(root: Path) -> bool:
    """Whether the disk is too full for the small files that an agent writes when it starts. Raises: StoreError.

    It also tries a write: the file system's numbers include neither a user's quota nor inodes.
    """
    with translate_errors(str(root), "measure", ""):
        if find_free_bytes(root) < _SMALL_FILES_BYTES:
            return True
    error = find_write_error(root, _KEPT_BYTES)
    return error is not None and is_full(error)
