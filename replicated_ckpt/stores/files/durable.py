"""Durable file operations, which survive a power loss once the call returns, and the errors of the disk as ours."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError, StoreDenied, StoreError, StoreFull
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.plain import closing_fd, open_plain_file

_IS_SHARED = stat.S_ISGID | stat.S_IRGRP | stat.S_IXGRP
SHARED_MODE = 0o2750
"""Of a directory that a group may read; what is made in it is of that group, too."""
_HINT_BY_ERRNO = {
    **dict.fromkeys(
        (errno.EIO, errno.EUCLEAN, errno.EBADMSG),
        "The disk has failed there: see `dmesg`. What it cannot read is loaded from other nodes; to save, or if it reads "
        "nothing at all, pass a root on another disk.",
    ),
    **dict.fromkeys(
        (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
        "The file system there cannot do that: pass a root on one with locks and file modes, as ext4 or XFS.",
    ),
    errno.ESTALE: "The shared file system has lost it: mount it again. A root belongs on the node's own disk.",
    errno.EMFILE: "This process has too many open files: raise `ulimit -n`.",
    errno.ENFILE: "This host has too many open files: see `sysctl fs.file-max`.",
    errno.EFBIG: "A file may not be so large there: raise `ulimit -f`, or pass a root on a file system that takes it.",
    errno.EXDEV: "Files of one store lie on two file systems, as where one is mounted inside the root: unmount it, or pass "
    "a root on a volume of its own.",
    errno.ENAMETOOLONG: "Use a shorter checkpoint id, or a shorter root.",
    errno.ENOTDIR: "A file lies where a directory must be: pass another root, or move the file away.",
}
_QUOTA_HINT = (
    "A quota is used up, which `df` need not show (`quota -s`, `btrfs qgroup show`): raise it, or `replicated-ckpt prune "
    "--root ROOT --keep-last N`. Then save again."
)
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system says that opens no file at all now, for want of descriptors or memory."""
NOT_OFFERED = (errno.EPERM, errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What mounts answer a call that they do not offer, as flock or fchmod; NFS locks no directory with EBADF."""
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
    """Whether it says that there is no room left, on the disk or in the user's quota."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def store_error_of(exc: OSError, store: str, op: str, key: str) -> StoreError:
    detail = f"{type(exc).__name__}: {exc.strerror or exc}"
    if is_full(exc):
        return StoreFull(store, op, key, detail, _QUOTA_HINT if exc.errno == errno.EDQUOT else None)
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreDenied(store, op, key, detail, _denied_hint(store, key, exc))
    return StoreError(store, op, key, detail, _HINT_BY_ERRNO.get(exc.errno or 0))


def is_refusal(error: StoreError) -> bool:
    """Whether the system would not read a file now, as for want of a permission: that says nothing of its bytes."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _REFUSALS


def _denied_hint(store: str, key: str, exc: OSError) -> str:
    if exc.errno == errno.EROFS:
        return (
            f"The file system of {store} is read-only: `dmesg` says whether its disk has failed; or pass another root."
        )
    place = exc.filename or store
    if not str(place).startswith("/"):  # it was opened from its directory
        place = f"{store}/{key}"
    allow = f"Let user {os.geteuid()} read and write {place} (`ls -ld` shows whose it is)"
    if exc.errno == errno.EPERM:
        return (
            f"{allow}. If so, it is immutable (`lsattr`), or its file system has no modes, as FAT: pass another root."
        )
    return f"{allow}, or pass another root."


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)


def flush_later(path: Path) -> Callable[[], None]:
    """What makes a file's bytes durable when it is called, whatever name it has by then; nothing if it is gone already."""
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

    So is one of this user's that is there already: it may have been made before the group was named.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    above = path.parent.stat()
    if above.st_mode & _IS_SHARED == _IS_SHARED:
        _share(path, above.st_gid)


def _share(path: Path, gid: int) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    with contextlib.suppress(OSError):  # what cannot be shared stays private, and serves its own user
        if status.st_gid != gid:
            os.chown(path, -1, gid)
        if status.st_gid != gid or status.st_mode & _IS_SHARED != _IS_SHARED:
            path.chmod(SHARED_MODE)


def make_directories(path: Path, above: Path) -> None:
    """Creates `path` below the existing `above`, durably: each name on the way is fsynced in its parent.

    Also a name that is there already: the process that made it may have been killed, or not have come, before its fsync.
    """
    if path == above:
        return
    make_directories(path.parent, above)
    make_directory(path)
    fsync_directory(path.parent)


def make_root(path: Path) -> None:
    """Creates a directory, private to this user, and what is missing above it, durably: names are fsynced up to the mount.

    Other users cannot write what it makes above it, whatever the umask is: the root would not be believed.
    A directory above that may not be read cannot be fsynced; it was there before, as no process makes names in it.
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
    """Replaces `path` by `data` at once: afterwards, and after a crash at any point, it holds the old or the new bytes.

    Not `is_flushed`: after a crash of the machine it may hold anything. Not `is_name_flushed`: after one it may hold the
    old bytes, or be missing, until the caller has fsynced its directory. If this raises, nothing else is left.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with closing_fd(fd):
            set_mode(fd, mode)
            write_all(fd, data)
            if is_flushed:
                os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_flushed and is_name_flushed:
        fsync_directory(path.parent)


def set_mode(fd: int, mode: int) -> None:
    """Gives a new file its mode, whatever the umask. A mount that takes none may leave it open to fewer users.

    Raises:
        OSError: the mount takes none, and the file is open to more users than `mode` allows.
    """
    try:
        os.fchmod(fd, mode)
    except OSError as exc:
        found = stat.S_IMODE(os.fstat(fd).st_mode)
        if exc.errno not in NOT_OFFERED:
            raise
        if found & ~mode:
            problem = f"fchmod to {mode:04o} is refused ({exc.strerror}), and the file has the mode {found:04o}"
            raise OSError(errno.EOPNOTSUPP, problem) from exc


def remove_broken_off_writes(directory: Path, of: str = "") -> None:
    """Removes what `write_file` left when its process was killed, under names that begin so.

    A running process keeps its own.
    """
    for path in directory.glob(f"{of}*.tmp"):
        pid = path.stem.rpartition(".")[2]
        if pid.isdecimal() and not is_there(f"/proc/{pid}"):
            path.unlink(missing_ok=True)


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
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
    """Size in bytes and CRC32C of a file. One that is not of `size_bytes` is not read, and its CRC32C is given as 0."""
    with open_plain_file(path) as file:
        found_bytes = os.fstat(file.fileno()).st_size
        return hash_open_file(file.fileno()) if found_bytes == size_bytes else (found_bytes, 0)


def hash_open_file(fd: int) -> tuple[int, int]:
    """Size in bytes and CRC32C of what can be read from it."""
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
        if count == 0:
            break
        done += count
    return done


def remove_tree(path: Path) -> None:
    """Removes a directory if it is there. A process that still writes into it may begin a file or two meanwhile."""
    for _ in range(_REMOVALS_MAX):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not is_there(path):
                return
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    shutil.rmtree(path)


UNREADABLE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG)
"""What is said of one place on a disk. Source: ext4 and XFS say the last two of what fails their own checksums."""


def find_unreadable(exc: BaseException) -> OSError | None:
    """The system's error, if it says that the disk has lost what lies at one place, or that another thing lies there.

    What lies elsewhere is as it was.
    """
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in UNREADABLE else None


def is_unreadable(exc: BaseException) -> bool:
    """Whether it says that, whatever it is raised as."""
    return find_unreadable(exc) is not None


@contextlib.contextmanager
def translate_read_errors(store: str, op: str, key: str) -> Iterator[None]:
    """As `translate_errors`; but bytes that the disk has lost are damaged ones: those around them may be as they were.

    Raises:
        ObjectCorrupt: the block has met such bytes. StoreError
    """
    try:
        with translate_errors(store, op, key):
            yield
    except StoreError as exc:
        if not is_unreadable(exc):
            raise
        raise ObjectCorrupt(store, op, key, exc.detail, exc.hint) from exc.__cause__


def raise_shortage(exc: Exception, path: Path) -> None:
    """For what handles the error of reading `path`. Another one than the system's passes.

    Raises:
        StoreError: it is for want of descriptors or memory, which says nothing of this file.
    """
    if isinstance(exc, OSError) and exc.errno in SHORTAGES:
        raise store_error_of(exc, str(path.parent), "read", path.name) from exc
