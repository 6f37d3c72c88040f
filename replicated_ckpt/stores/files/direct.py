"""Direct I/O: which file systems support it, and how a file's descriptor is switched to it and back."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = 4096
"""Memory, offset and size of a direct write are multiples of this: no block device in use asks for more."""


def is_worthwhile(directory: Path, mode: str) -> bool:
    """Whether files there should be written past the page cache, as far as the file system allows it.

    "auto": if the file system lies on a block device of its own. Others (tmpfs, overlayfs, NFS, btrfs, ZFS) refuse it,
    or accept the flag and still write through the page cache. "on": tried everywhere. "off": nowhere.
    """
    # Major 0: a file system without a block device of its own.
    return mode == "on" or (mode == "auto" and os.major(directory.stat().st_dev) != 0)


def switch_direct_io(fd: int, *, on: bool) -> bool:
    """Switches direct I/O of an open file on or off; returns whether it is on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as exc:
        # EINVAL: this file system has no direct I/O. Any other error is one of the disk.
        if exc.errno != errno.EINVAL:
            raise
        return False
    return on


def page_aligned(size_bytes: int) -> memoryview:
    """Memory for direct I/O."""
    return memoryview(mmap.mmap(-1, size_bytes))


def write_direct(fd: int, data: memoryview) -> int:
    """Writes the whole pages of page-aligned memory at the file's position; returns the bytes written, 0 if refused."""
    done, whole = 0, len(data) - len(data) % PAGE_BYTES
    try:
        while done < whole:
            done += os.write(fd, data[done:whole])
            if done % PAGE_BYTES:  # a short write: the next one would start unaligned, and be refused
                break
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    return done


def read_past_cache(fd: int, scratch: memoryview) -> Iterator[memoryview]:
    """The bytes of a file from its start on, in pieces that lie in `scratch`: page-aligned memory of whole pages.

    On a file system with direct I/O the page cache is unchanged, and other processes keep their pages. Elsewhere each
    piece is dropped from the cache once the caller asks for the next one. `fd` must not be shared.
    """
    is_direct = os.major(os.fstat(fd).st_dev) != 0 and switch_direct_io(fd, on=True)
    offset = 0
    while True:
        try:
            count = os.preadv(fd, [scratch], offset)
        except OSError as exc:
            # Some file systems accept the flag, and refuse the read itself.
            if exc.errno != errno.EINVAL or not is_direct:
                raise
            is_direct = switch_direct_io(fd, on=False)
            continue
        if count == 0:
            if is_direct:
                switch_direct_io(fd, on=False)
            else:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # drops what the kernel read ahead
            return
        yield scratch[:count]
        if not is_direct:
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
        elif count % PAGE_BYTES:  # an unaligned end: goes on without direct I/O, as the file may have grown
            is_direct = switch_direct_io(fd, on=False)
        offset += count


def address_of(piece: memoryview) -> int:
    """The address of a writable piece that is not empty."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(piece))
