"""The pool of recycled files: shards of the checkpoint that retention removed last.

The next save overwrites them with its own shards. Pages and extents that a file already has cost less than fresh ones.
Files in the pool do not belong to a checkpoint, and no reader uses their bytes. A file leaves the pool as a `.part`. It
gets a shard's name only after all of it is rewritten, cut to size and fsynced, and its removal from the pool is durable.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISGID, S_ISREG

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import RECYCLED_DIR, SHARD_SUFFIX, ShardName
from replicated_ckpt.core.parts import part_of_shard
from replicated_ckpt.stores.files.durable import fsync_directory, make_directory
from replicated_ckpt.stores.files.locks import exclusive

log = logging.getLogger(__name__)

_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def is_open_elsewhere(fd: int) -> bool:
    """Whether any other process has the file behind `fd`, open for writing, open or mapped; True if that is unknown.

    The kernel grants a write lease only on a file that nothing else has open. The lease is ended at once. If another
    process opens the file meanwhile, it waits, and the kernel signals this process. The signal is SIGURG, which is ignored
    by default: the usual SIGIO would kill the process.

    Source: Linux fcntl(2), F_SETLEASE; `check_conflicting_open` in fs/locks.c.
    """
    return not _is_leased(fd) or not _sees_mappings(fd)


def _is_leased(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:  # EAGAIN: open elsewhere; others: no leases in this file system or container
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _sees_mappings(fd: int) -> bool:
    """Whether the kernel refuses the lease for a file that is only mapped. Tried with a mapping of one page.

    On overlayfs, a container's own file system, it does not. Source: Linux, `ovl_mmap` in fs/overlayfs/file.c: the mapping
    refers to the file of the lower layer.
    """
    try:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        page = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, other, 0)
    finally:
        os.close(other)
    if page == _MAP_FAILED:
        return False
    try:
        return not _is_leased(fd)
    finally:
        _libc.munmap(page, mmap.PAGESIZE)


def is_sole_name(status: os.stat_result) -> bool:
    """Whether a file has one name only, and is this user's."""
    return status.st_nlink == 1 and status.st_uid == os.geteuid()


_SUFFIX = ".recycled"


class RecycledFiles:
    """The pool of one store: at most one file for each shard name of one checkpoint. Safe for several processes at once.

    If a file is missing, linked elsewhere or another user's, the save makes a new one.
    """

    def __init__(self, root: Path) -> None:
        self._pool = root / RECYCLED_DIR

    def put_files(self, directory: Path, shards: Sequence[str]) -> None:
        """Moves shards of a removed checkpoint into the pool, and removes the pool's old files of the same parts.

        The shards' removal from the checkpoint must be durable. Files that cannot be moved stay where they are.
        """
        try:
            names = [name for name in shards if _is_usable(directory / name)]
            make_directory(self._pool)
            parts = set(map(part_of_shard, names))
            for path in self._files():
                name = path.name.replace(_SUFFIX, SHARD_SUFFIX)
                is_other_part = ShardName.parse(name) is not None and part_of_shard(name) not in parts
                # One generation only: the pool must not grow beyond the size of one checkpoint. Where one checkpoint loses
                # its optimizer, and an older one is removed, the pool has parts of both.
                if name not in names and not (names and is_other_part):
                    path.unlink(missing_ok=True)
            for name in names:
                (directory / name).rename(self._pool_path(name))
        except OSError as exc:
            log.warning("files of %s are not recycled: %s", directory, exc)

    def take_file(self, part: Path, name: str) -> int | None:
        """Renames the pool's file for a shard to `part`; returns its descriptor, for writing. None: there is none.

        A file that a process still reads is unlinked, and stays readable for that process.
        """
        path = self._pool_path(name)
        try:
            if not S_ISREG(path.lstat().st_mode):
                return None
            path.rename(part)
        except FileNotFoundError:
            return None
        except OSError as exc:
            log.warning("the recycled file for %s is not used: %s", part, exc)
            return None
        # After the rename: two ranks can ask for the same file, and only one rename succeeds.
        fd = _open_if_free(part)
        if fd is None:
            part.unlink(missing_ok=True)
        else:
            failpoints.reach("store.recycled")
        return fd

    def sync(self) -> None:
        """Makes the removal of taken files from the pool durable."""
        with contextlib.suppress(FileNotFoundError):  # a user or another process has removed the pool
            fsync_directory(self._pool)

    def drop(self) -> int:
        """Removes all files in the pool. Returns the freed bytes.

        Waits for another process that does the same: all ranks of a node meet a full disk at the same time, and the
        room of a file becomes free only some time after its unlink.
        """
        with exclusive(self._pool):
            freed = self.size_bytes()
            for path in self._files():
                path.unlink(missing_ok=True)
        return freed

    def size_bytes(self) -> int:
        """The pool's size on the disk, which the next save can use."""
        total = 0
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_blocks * 512
        return total

    def _files(self) -> Iterator[Path]:
        try:
            entries = [entry for entry in os.scandir(self._pool) if entry.name.endswith(_SUFFIX)]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # the pool of another user's store: its room is not ours
        yield from (Path(entry.path) for entry in entries if not entry.is_dir(follow_symlinks=False))

    def _pool_path(self, name: str) -> Path:
        """The path of a file in the pool. It is not a shard's name, so no reader uses it."""
        return self._pool / (name.removesuffix(SHARD_SUFFIX) + _SUFFIX)


class RoomOfRecycled(RecycledFiles):
    """The same pool, for files that get their name before their bytes are durable. It frees room, but returns no file.

    After a power loss, a recycled file could have its complete old bytes under the new name.
    """

    def take_file(self, part: Path, name: str) -> int | None:
        """Removes the pool's file for a shard, to free its room for the new one."""
        try:
            self._pool_path(name).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("the recycled file for %s stays for now: %s", part, exc)
        return None


def _is_usable(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    # A file with a second name, as a user's hard link, would change there, too.
    return S_ISREG(status.st_mode) and is_sole_name(status)


def _open_if_free(part: Path) -> int | None:
    """Opens a file that may be overwritten; None for any other file.

    It must be a plain file of this user and of a new file's group, and be neither linked nor open elsewhere.
    """
    try:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        log.warning("a recycled file is not used: %s", exc)
        return None
    status = os.fstat(fd)
    # Checked again on the open file: another user of a shared store may have swapped it.
    is_ours = S_ISREG(status.st_mode) and is_sole_name(status) and status.st_gid == _group_in(part.parent)
    if is_ours and not is_open_elsewhere(fd):
        return fd
    os.close(fd)
    return None


def _group_in(directory: Path) -> int:
    """The group that a new file in the directory gets."""
    status = directory.stat()
    return status.st_gid if status.st_mode & S_ISGID else os.getegid()
