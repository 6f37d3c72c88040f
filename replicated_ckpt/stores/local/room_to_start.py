"""Room for an agent on a full disk: without one, no command removes a checkpoint there."""

import contextlib
import os
from pathlib import Path

from replicated_ckpt.core.layout import RECYCLED_DIR, ROOM_NAME
from replicated_ckpt.stores.files.durable import is_full, translate_errors, write_all
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.plain import closing_fd
from replicated_ckpt.stores.files.room import find_free_bytes, find_write_error
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

_SMALL_FILES_BYTES = 1 << 20
_KEPT_BYTES = 128 << 10
"""What an agent writes when it starts, some small files and the first lines of its log, takes less; so does a removal."""
_KEPT_NAMES = (ROOM_NAME, f"{ROOM_NAME}.1")
"""Two inodes, as a file is replaced by another one next to it, and the log may begin."""


def keep_room_to_start(root: Path) -> None:
    """Has files take that room, if they do not yet and the disk has it: they go when an agent needs it on a full disk."""
    with contextlib.suppress(OSError):  # without it all works until the disk is full
        for name in _KEPT_NAMES:
            if not is_there(root / name):
                _fill(root / name, _KEPT_BYTES // len(_KEPT_NAMES))


def _fill(path: Path, size_bytes: int) -> None:
    """Raises OSError: the disk has not so much room, and nothing is left; or another process has just done it."""
    with closing_fd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)) as fd:
        try:
            write_all(fd, os.urandom(size_bytes))
        except OSError:
            path.unlink()
            raise


def make_room_to_start(root: Path) -> None:
    """Has recycled files go, and what was kept for it, if they leave no room for what an agent writes when it starts.

    The note of a removal, too: what is to make room needs some.
    """
    if lacks_room_to_start(root):
        with translate_errors(str(root), "make room in", RECYCLED_DIR):
            RecycledFiles(root).drop()
            for name in _KEPT_NAMES:
                (root / name).unlink(missing_ok=True)


def lacks_room_to_start(root: Path) -> bool:
    """Whether the disk is too full for the small files that an agent writes when it starts. Raises: StoreError.

    It is tried, too: the file system's numbers say nothing of a user's quota, or of inodes.
    """
    with translate_errors(str(root), "measure", ""):
        if find_free_bytes(root) < _SMALL_FILES_BYTES:
            return True
    error = find_write_error(root, _KEPT_BYTES)
    return error is not None and is_full(error)
