"""Room for an agent on a full disk: without one, no command removes a checkpoint there."""

import contextlib
import os
from pathlib import Path

from replicated_ckpt.core.layout import RECYCLED_DIR, ROOM_NAME
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.room import find_free_bytes
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

_SMALL_FILES_BYTES = 1 << 20
_KEPT_BYTES = 128 << 10
"""What an agent writes when it starts, some small files and the first lines of its log, takes less; so does a removal."""


def keep_room_to_start(root: Path) -> None:
    """Has a file take that room, if it does not yet and the disk has it: it goes when an agent needs it on a full disk."""
    with contextlib.suppress(OSError):  # without it all works until the disk is full
        if not is_there(root / ROOM_NAME):
            write_file(root / ROOM_NAME, os.urandom(_KEPT_BYTES), is_flushed=False)


def make_room_to_start(root: Path) -> None:
    """Has recycled files go, and what was kept for it, if they leave no room for what an agent writes when it starts.

    The note of a removal, too: what is to make room needs some.
    """
    if lacks_room_to_start(root):
        with translate_errors(str(root), "make room in", RECYCLED_DIR):
            RecycledFiles(root).drop()
            (root / ROOM_NAME).unlink(missing_ok=True)


def lacks_room_to_start(root: Path) -> bool:
    """Whether the disk is too full for the small files that an agent writes when it starts. Raises: StoreError."""
    with translate_errors(str(root), "measure", ""):
        return find_free_bytes(root) < _SMALL_FILES_BYTES
