"""`read_past_cache` returns the file's bytes and leaves the page cache unchanged."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from replicated_ckpt.stores.files.direct import PAGE_BYTES, page_aligned, read_past_cache

SCRATCH_BYTES = 64 << 10
_libc = ctypes.CDLL(None, use_errno=True)


def cached_pages(path: Path) -> int:
    """The number of pages of a file in the page cache. Source: mincore(2)."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        flags = (ctypes.c_ubyte * (-(-size // PAGE_BYTES)))()
        view = (ctypes.c_char * size).from_buffer(mapped)
        try:
            assert _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags) == 0
        finally:
            del view
        return sum(flag & 1 for flag in flags)


def read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return b"".join(bytes(piece) for piece in read_past_cache(fd, page_aligned(SCRATCH_BYTES)))
    finally:
        os.close(fd)


def written(path: Path, size_bytes: int) -> bytes:
    data = os.urandom(size_bytes)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return data


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, SCRATCH_BYTES, SCRATCH_BYTES + 1, 5 * SCRATCH_BYTES - 7])
@pytest.mark.parametrize("folder", ["disk", "/dev/shm"])
def test_every_byte_comes_once(tmp_path: Path, folder: str, size: int) -> None:
    """Files of zero bytes, part of a page, and whole pages, on file systems with and without direct reads."""
    path = (tmp_path if folder == "disk" else Path(folder)) / f"read-past-cache-{os.getpid()}-{size}"
    try:
        data = written(path, size)
        assert read(path) == data
    finally:
        path.unlink()


def test_unflushed_bytes_are_read(tmp_path: Path) -> None:
    """A direct read returns bytes that are only in the page cache."""
    path = tmp_path / "file"
    data = os.urandom(3 * SCRATCH_BYTES)
    path.write_bytes(data)
    assert read(path) == data


def test_the_page_cache_is_as_it_was(tmp_path: Path) -> None:
    """Cached pages stay cached, and uncached pages stay uncached."""
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("the temporary directory lies on no block device")
    path = tmp_path / "file"
    size = 64 * SCRATCH_BYTES
    written(path, size)
    path.read_bytes()
    assert cached_pages(path) == size // PAGE_BYTES
    read(path)
    assert cached_pages(path) == size // PAGE_BYTES
    drop(path)
    assert cached_pages(path) == 0
    read(path)
    assert cached_pages(path) == 0
