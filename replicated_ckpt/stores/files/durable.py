"""Durable file operations, whose results survive a power loss once the call returns, and the translation of disk errors."""

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError, StoreDenied, StoreError, StoreFull
from replicated_ckpt.stores.files.existence import closing_fd, is_name_taken, is_there, open_plain_file

_IS_SHARED = stat.S_ISGID | stat.S_IRGRP | stat.S_IXGRP
SHARED_MODE = 0o2750
"""Mode of a directory that a group may read. Files and directories made in it belong to that group, too."""
_HINT_BY_ERRNO = {
    **dict.fromkeys(
        (errno.EIO, errno.EUCLEAN, errno.EBADMSG),
        "The disk has failed: see `dmesg`. Loads read from other nodes. To save, or if nothing can be read, pass "
        "a root on another disk.",
    ),
    **dict.fromkeys(
        (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
        "That file system does not support this: pass a root on one with locks and file modes, such as ext4 or XFS.",
    ),
    errno.ESTALE: "The shared file system has lost this file: mount it again. Use a root on the node's own disk.",
    errno.EMFILE: "This process has too many open files: raise `ulimit -n`.",
    errno.ENFILE: "This host has too many open files: see `sysctl fs.file-max`.",
    errno.EFBIG: "The file is too large for the limits there: raise `ulimit -f`, or pass a root on another file system.",
    errno.EXDEV: "Files of one store lie on two file systems, one of them mounted inside the root. Unmount it, or pass a "
    "root on its own volume.",
    errno.ENAMETOOLONG: "Use a shorter checkpoint id, or a shorter root.",
    errno.ENOTDIR: "A file lies where a directory is needed: pass another root, or move the file away.",
}
_QUOTA_HINT = (
    "A quota is used up: see `quota -s` or `btrfs qgroup show`, as `df` may not show it. Raise it, or run "
    "`replicated-ckpt prune --root ROOT --keep-last N --keep-in-bucket`. Then save again."
)
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The process or host is out of descriptors or memory: such an error proves nothing about the file."""
NOT_OFFERED = (errno.EPERM, errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of mounts that do not offer a call, such as flock or fchmod. NFS refuses flock on a directory with EBADF."""
_REMOVALS_MAX = 5
_REFUSALS = (errno.EACCES, errno.EPERM, errno.ESTALE, *SHORTAGES)


@contextlib.contextmanager
def translate_errors(store: str, op: str, key: str) -> Iterator[None]:
    """Turns an OSError of the block into the typed error that names store, operation and key."""
    try:
        yield
    except ReplicatedCkptError:
        raise
    except OSError as exc:
        raise store_error_of(exc, store, op, key) from exc


def is_full(exc: OSError) -> bool:
    """Whether the disk is full, or the user's quota used up."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def store_error_of(exc: OSError, store: str, op: str, key: str) -> StoreError:
    detail = f"{type(exc).__name__}: {exc.strerror or exc}"
    if is_full(exc):
        return StoreFull(store, op, key, detail, _QUOTA_HINT if exc.errno == errno.EDQUOT else None)
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreDenied(store, op, key, detail, _denied_hint(store, key, exc))
    return StoreError(store, op, key, detail, _HINT_BY_ERRNO.get(exc.errno or 0))


def is_refusal(error: StoreError) -> bool:
    """Whether the system refused to read a file, for example without permission. This is not evidence of damage."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _REFUSALS


def _denied_hint(store: str, key: str, exc: OSError) -> str:
    if exc.errno == errno.EROFS:
        return (
            f"The file system of {store} is read-only: `dmesg` shows whether its disk has failed. Or pass another root."
        )
    place = exc.filename or store
    if not str(place).startswith("/"):  # opened relative to a directory descriptor: only the name is known
        place = f"{store}/{key}"
    allow = f"Let user {os.geteuid()} read and write {place} (`ls -ld` shows the owner)"
    if exc.errno == errno.EPERM:
        return (
            f"{allow}. If the user already can, pass another root: this one is immutable (`lsattr`), or on a file system "
            "without modes, such as FAT."
        )
    return f"{allow}, or pass another root."


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)


def flush_later(path: Path) -> Callable[[], None]:
    """Opens a file now; the returned function fsyncs it later, even if it was renamed. A missing file is ignored."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return lambda: None

    def flush() -> None:
        with file:
            os.fsync(file.fileno())

    return flush


def make_directory(path: Path) -> None:
    """Makes a directory if it is missing: private to this user, or shared with a group as the directory above is.

    An existing directory of this user is shared, too: it may be older than REPLICATED_CKPT_GROUP.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    above = path.parent.stat()
    if above.st_mode & _IS_SHARED == _IS_SHARED:
        _share(path, above.st_gid)


def _share(path: Path, gid: int) -> None:
    # lstat: chmod through a link would open a directory elsewhere.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    with contextlib.suppress(OSError):  # some mounts refuse it: the directory stays private, and usable
        if status.st_gid != gid:
            os.chown(path, -1, gid)
        # After chown: while the group is not one of this user's, chmod drops the set-group-id bit.
        if status.st_gid != gid or status.st_mode & _IS_SHARED != _IS_SHARED:
            path.chmod(SHARED_MODE)


def make_directories(path: Path, above: Path) -> None:
    """Creates `path` below the existing `above`, durably: each name on the way is fsynced in its parent.

    Existing names are fsynced, too: the process that made them may not have reached its fsync.
    """
    if path == above:
        return
    make_directories(path.parent, above)
    make_directory(path)
    fsync_directory(path.parent)


def make_root(path: Path) -> None:
    """Creates a directory, private to this user, and missing ones above it, durably: names are fsynced up to the mount.

    Whatever the umask, other users cannot write to these directories: otherwise `check_root` would refuse the root.
    A parent that this user may not read cannot be fsynced. It existed before, so its name needs no fsync here.
    """
    _make_directories(path, mode=0o700)
    for inner, outer in zip((path, *path.parents), path.parents, strict=False):
        if inner.is_mount():
            return
        with contextlib.suppress(PermissionError):
            fsync_directory(outer)


def _make_directories(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode=mode, exist_ok=True)
    except FileNotFoundError:
        _make_directories(path.parent, mode=0o755)
        path.mkdir(mode=mode, exist_ok=True)


def write_file(
    path: Path, data: bytes, mode: int = 0o644, *, is_flushed: bool = True, is_name_flushed: bool = True
) -> None:
    """Replaces `path` by `data` atomically: after a crash at any point it holds the old or the new bytes.

    Without `is_flushed`, it may hold anything after a power loss. Without `is_name_flushed`, it may hold the old bytes or
    be missing after a power loss, until the caller fsyncs its directory. On an error no temporary file is left.
    """
    # By the pid, `remove_broken_off_writes` distinguishes a killed writer's file from a running one's.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # O_NOFOLLOW: another user may have put a link there, to a file of ours.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with closing_fd(fd):
            set_mode(fd, mode)
            write_all(fd, data)
            # Before the rename: else a power loss can leave the new name with no bytes.
            if is_flushed:
                os.fsync(fd)
        # After close: an NFS server may report a full disk only there.
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_flushed and is_name_flushed:
        fsync_directory(path.parent)


def set_mode(fd: int, mode: int) -> None:
    """Sets a new file's mode, whatever the umask. On a mount without fchmod the file may be open to fewer users.

    Raises:
        OSError: the mount has no fchmod, and the file is open to more users than `mode` allows.
    """
    try:
        os.fchmod(fd, mode)
    except OSError as exc:
        found = stat.S_IMODE(os.fstat(fd).st_mode)
        if exc.errno not in NOT_OFFERED:
            raise
        # The file may hold a token: open to too many users is an error, to too few is not.
        if found & ~mode:
            problem = f"fchmod to {mode:04o} is refused ({exc.strerror}), and the file has the mode {found:04o}"
            raise OSError(errno.EOPNOTSUPP, problem) from exc


def remove_broken_off_writes(directory: Path, of: str = "") -> None:
    """Removes temporary files of `write_file` whose process was killed, with names that begin with `of`.

    Those of running processes stay.
    """
    for path in directory.glob(f"{of}*.tmp"):
        pid = path.stem.rpartition(".")[2]
        if pid.isdecimal() and not is_there(f"/proc/{pid}"):
            path.unlink(missing_ok=True)


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        # write(2) may take less: at a signal, a quota, or 2 GiB at once.
        view = view[os.write(fd, view) :]


def write_vector(fd: int, pieces: Sequence[memoryview]) -> None:
    """Writes several pieces one after the other, at most 1024 (the kernel's IOV_MAX), without joining them."""
    left = [piece for piece in pieces if piece]
    while left:
        count = os.writev(fd, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def hash_file(path: Path, size_bytes: int) -> tuple[int, int]:
    """Size in bytes and CRC32C of a file. A file of another size than `size_bytes` is not read; its CRC32C is 0."""
    with open_plain_file(path) as file:
        found_bytes = os.fstat(file.fileno()).st_size
        return hash_open_file(file.fileno()) if found_bytes == size_bytes else (found_bytes, 0)


def hash_open_file(fd: int) -> tuple[int, int]:
    """Size in bytes and CRC32C of all bytes from the file's start to its end."""
    piece, offset, crc = memoryview(bytearray(1 << 20)), 0, 0
    while count := read_exactly(fd, piece, offset):
        crc = crc32c(piece[:count], crc)
        offset += count
    return offset, crc


def read_exactly(fd: int, target: memoryview, offset: int) -> int:
    """Fills `target` from `offset` on; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        # The file ends: without this a truncated file would be read for ever.
        if count == 0:
            break
        done += count
    return done


def remove_tree(path: Path) -> None:
    """Removes a directory if it is there, even while another process creates a few more files in it."""
    for _ in range(_REMOVALS_MAX):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            # The missing name may be a file inside, which another process removed first.
            if not is_there(path):
                return
        except OSError as exc:
            # A file was created between the listing and rmdir: list again.
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    shutil.rmtree(path)


UNREADABLE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG)
"""Errors of one place on a disk. Source: ext4 and XFS return the last two for blocks that fail their own checksums."""


def find_unreadable(exc: BaseException) -> OSError | None:
    """The OSError behind `exc`, if it concerns one place on the disk: lost bytes, or a directory or link in their place.

    Files at other places are not affected. None for any other error.
    """
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in UNREADABLE else None


def is_unreadable(exc: BaseException) -> bool:
    """Whether `find_unreadable` finds such an error behind `exc`."""
    return find_unreadable(exc) is not None


@contextlib.contextmanager
def translate_read_errors(store: str, op: str, key: str) -> Iterator[None]:
    """As `translate_errors`, but an unreadable place on the disk is damage: the bytes around it may be intact.

    Raises:
        ObjectCorrupt: the block read such a place. StoreError: any other error.
    """
    try:
        with translate_errors(store, op, key):
            yield
    except StoreError as exc:
        if not is_unreadable(exc):
            raise
        raise ObjectCorrupt(store, op, key, exc.detail, exc.hint) from exc.__cause__


def raise_shortage(exc: Exception, path: Path) -> None:
    """Keeps a shortage of descriptors or memory from being handled as damage of `path`. Does nothing for other errors.

    Raises:
        StoreError: the error is such a shortage.
    """
    if isinstance(exc, OSError) and exc.errno in SHORTAGES:
        raise store_error_of(exc, str(path.parent), "read", path.name) from exc


_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(first: Path, second: Path) -> bool:
    """Swaps two names atomically; False where kernel or file system cannot."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def rename_if_free(path: Path, target: Path) -> bool:
    """Renames `path` unless `target` is there. If it is, returns False and changes nothing."""
    try:
        if _renameat2(path, target, _RENAME_NOREPLACE):
            return True
    except FileExistsError:
        return False
    # The fallback is not atomic: two processes may both see a free name.
    if is_name_taken(target):
        return False
    path.rename(target)
    return True


def _renameat2(first: Path, second: Path, flags: int) -> bool:
    """False where kernel or file system cannot. Source: Linux renameat2(2)."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), flags) == 0:
        return True
    code = ctypes.get_errno()
    # EPERM can also come from an immutable file: then a plain rename must not be tried.
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP) or (code == errno.EPERM and _is_filtered(flags)):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def _is_filtered(flags: int) -> bool:
    """Whether a container's seccomp filter refuses the call. A kernel that gets it returns ENOENT for the empty path."""
    _libc.renameat2(_AT_FDCWD, b"", _AT_FDCWD, b"", flags)
    return ctypes.get_errno() == errno.EPERM


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def name_small_file(path: Path, target: Path) -> None:
    """Gives a small file a second name, or copies it if the file system has no hard links."""
    if not link_file(path, target):
        write_file(target, path.read_bytes())


def link_file(path: Path, target: Path) -> bool:
    """Gives a file a second name. Returns False if the file system has no hard links. Raises OSError"""
    try:
        if is_there(target) and os.path.samestat(path.lstat(), target.lstat()):
            return True
        path.lstat()
        # An interrupted try may have left the name, for other bytes, and link(2) does not replace it.
        target.unlink(missing_ok=True)
        os.link(path, target, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        return False
    return True
