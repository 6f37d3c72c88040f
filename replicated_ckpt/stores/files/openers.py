"""Whether a file is open elsewhere, in this process or in any other."""

import ctypes
import fcntl
import mmap
import os
import signal

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
    """Whether the file behind `fd`, which is open for writing, is open or mapped by anything else; True if none can tell.

    The kernel grants a lease for writing only on a file that nothing else has open. It is given back at once. An open
    of the file meanwhile waits for that, and sends this process SIGURG, which is ignored by default; SIGIO, which it would
    send otherwise, ends a process. Source: Linux fcntl(2), F_SETLEASE; `check_conflicting_open` in fs/locks.c.
    """
    return not _is_leased(fd) or not _sees_mappings(fd)


def _is_leased(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:  # EAGAIN: it is open elsewhere; others: this file system, or container, has no leases
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _sees_mappings(fd: int) -> bool:
    """Whether the lease is refused while the file is mapped, and no descriptor of it is open any more: tried with a page.

    On overlayfs, a container's own file system, it is granted. Source: Linux, `ovl_mmap` in fs/overlayfs/file.c, which has
    the mapping hold the file of the layer below instead.
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
