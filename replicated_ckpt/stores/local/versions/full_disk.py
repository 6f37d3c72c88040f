"""A full disk: writes that first make room on it, the room that is left, and a small reserve for the start of an agent."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from replicated_ckpt.core.layout import RECYCLED_DIR, ROOM_NAME
from replicated_ckpt.stores.files.durable import is_full, translate_errors, write_all, write_file
from replicated_ckpt.stores.files.existence import closing_fd, is_there
from replicated_ckpt.stores.files.room import Room, find_free_bytes, find_write_error
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

_SMALL_FILES_BYTES = 1 << 20
_RESERVED_BYTES = 128 << 10
"""Reserved bytes: enough for an agent's small files and first log lines at its start, and for a removal."""
_RESERVE_NAMES = (ROOM_NAME, f"{ROOM_NAME}.1")
"""Two files, for their inodes: an agent writes a small file anew under a second name, and may create its log."""


def write_with_room(
    root: Path, path: Path, data: bytes, *, is_flushed: bool = True, is_name_flushed: bool = True
) -> None:
    """As `write_file`. On a full disk it removes the store's recycled files and tries again."""
    try_with_room(root, partial(write_file, path, data, is_flushed=is_flushed, is_name_flushed=is_name_flushed))


def try_with_room(root: Path, write: Callable[[], None]) -> None:
    """Calls `write`. If the disk is full, it removes the store's recycled files and calls `write` again."""
    try:
        write()
    except OSError as exc:
        if not is_full(exc):
            raise
        RecycledFiles(root).drop()
        write()


def measure_room(root: Path) -> Room:
    """The room of a store's file system. The room of recycled files counts as free."""
    with translate_errors(str(root), "measure", ""):
        found, recycled = os.statvfs(root), RecycledFiles(root).size_bytes()
    size = found.f_blocks * found.f_frsize
    return Room(min(found.f_bavail * found.f_frsize + recycled, size), size)


def try_room(root: Path) -> Room:
    """As `measure_room`, and whether a file can be written there now. For the store's own user."""
    room, error = measure_room(root), find_write_error(root)
    if error is None or (is_full(error) and RecycledFiles(root).size_bytes()):
        return room
    return replace(room, write_error=error.strerror or str(error))


def keep_room_to_start(root: Path) -> None:
    """Reserves room for the start of an agent, in files that `make_room_to_start` removes on a full disk.

    Without an agent, no command could remove a checkpoint there.
    """
    with contextlib.suppress(OSError):  # without the reserve everything works until the disk is full
        for name in _RESERVE_NAMES:
            if not is_there(root / name):
                _fill(root / name, _RESERVED_BYTES // len(_RESERVE_NAMES))


def _fill(path: Path, size_bytes: int) -> None:
    """Makes a file. Raises OSError: the disk is full, and no file is left; or another process has just made it."""
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
            for name in _RESERVE_NAMES:
                (root / name).unlink(missing_ok=True)


def lacks_room_to_start(root: Path) -> bool:
    """Whether the disk is too full for the small files that an agent writes when it starts. Raises: StoreError.

    It also tries a write: the file system's numbers include neither a user's quota nor inodes.
    """
    with translate_errors(str(root), "measure", ""):
        if find_free_bytes(root) < _SMALL_FILES_BYTES:
            return True
    error = find_write_error(root, _RESERVED_BYTES)
    return error is not None and is_full(error)
