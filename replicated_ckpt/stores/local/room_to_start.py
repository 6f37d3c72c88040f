"""Room for an agent on a full disk: without one, no command removes a checkpoint there."""

import contextlib
import os
from pathlib import Path

from replicated_ckpt.core.layout import RECYCLED_DIR, ROOM_NAME
from replicated_ckpt.stores.files.durable import is_full, translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.room import find_free_bytes, find_write_error
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

_SMALL_FILES_BYTES = 1 << 20
_KEPT_BYTES, _KEPT_FILES = 128 << 10, 4
"""What an agent writes when it starts, some small files and the first lines of its log, takes less; so does a removal."""


def keep_room_to_start(root: Path) -> None:
    """Has files take that room, if they do not yet and the disk has it: they go when an agent needs it on a full disk."""
    with contextlib.suppress(OSError):  # without it all works until the disk is full
        for path in _kept_files(root):
            if not is_there(path):
                write_file(path, os.urandom(_KEPT_BYTES // _KEPT_FILES), is_flushed=False)


def make_room_to_start(root: Path) -> None:
    """Has recycled files go, and what was kept for it, if they leave no room for what an agent writes when it starts.

    The note of a removal, too: what is to make room needs some.
    """
    if lacks_room_to_start(root):
        with translate_errors(str(root), "make room in", RECYCLED_DIR):
            RecycledFiles(root).drop()
            for path in _kept_files(root):
                path.unlink(missing_ok=True)


def lacks_room_to_start(root: Path) -> bool:
    """Whether the disk is too full for the small files that an agent writes when it starts. Raises: StoreError.

    It is tried, too: the file system's numbers say nothing of a user's quota, or of inodes.
    """
    with translate_errors(str(root), "measure", ""):
        if find_free_bytes(root) < _SMALL_FILES_BYTES:
            return True
    error = find_write_error(root, _KEPT_BYTES)
    return error is not None and is_full(error)


def _kept_files(root: Path) -> list[Path]:
    return [root / ROOM_NAME, *(root / f"{ROOM_NAME}.{number}" for number in range(1, _KEPT_FILES))]
