"""A cache: verified pieces that one process of a node has fetched, for other processes of the node to take.

A file in the agent's directory, mapped by all of them. Only its owner writes it: a few slots, used in turn, and a board
of words that says how the owner is. Each taker copies a piece and compares the copy with its check: whatever becomes of
the slot meanwhile, it never uses other bytes. The owner holds a lock on the file for as long as it lives.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Self

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.stores.files.direct import address_of
from replicated_ckpt.stores.files.locks import DescriptorLock

SLOTS = 4
OVER = 1 << 62
"""More pieces than any cache has: passed by a process that takes no more of them."""
_PREFIX = "cache-"
_TRIES = 16
_PULSE, _LEFT, _SILENT, _ENTRIES = 0, 1, 2, 10
_ENTRY_WORDS = 4


class Board:
    """The words of one cache. Every process sees what the owner wrote last, each word by itself.

    An entry says which piece lies in a slot, where it begins there, its size and its check. A torn one is found by that.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._passed = _ENTRIES + _ENTRY_WORDS * SLOTS

    @staticmethod
    def word_count(ranks: int) -> int:
        return _ENTRIES + _ENTRY_WORDS * SLOTS + ranks

    @property
    def pulse_ns(self) -> int:
        """When the owner last worked, or waited for a source and not for another rank; by the host's monotonic clock."""
        return int(self._words[_PULSE])

    def pulse(self, at_ns: int) -> None:
        self._words[_PULSE] = max(at_ns, self.pulse_ns)

    @property
    def has_left(self) -> bool:
        """Whether the owner puts nothing more and takes nothing more."""
        return bool(self._words[_LEFT])

    def leave(self) -> None:
        self._words[_LEFT] = 1

    def count_passed(self, fetcher: int) -> int:
        """How many pieces of rank `fetcher`'s cache the owner needs no more, from the first on; -1: not opened yet."""
        return int(self._words[self._passed + fetcher]) - 1

    def pass_pieces(self, fetcher: int, count: int) -> None:
        self._words[self._passed + fetcher] = count + 1

    def entry(self, number: int) -> tuple[int, int, int, int]:
        """Of the slot of piece `number`: the piece in it or -1, where that begins, its size and its check."""
        start = _ENTRIES + _ENTRY_WORDS * (number % SLOTS)
        there, begin, size_bytes, crc = self._words[start : start + _ENTRY_WORDS]
        return there - 1, begin, size_bytes, crc

    def set_entry(self, number: int, begin: int, size_bytes: int, crc: int) -> None:
        start = _ENTRIES + _ENTRY_WORDS * (number % SLOTS)
        self._words[start + 1] = begin
        self._words[start + 2] = size_bytes
        self._words[start + 3] = crc
        self._words[start] = number + 1

    def tell_silent(self, node: str) -> None:
        """Tells the node's other ranks that `node` let a time-out pass. What does not fit is not told."""
        mark = _mark(node)
        for index in range(_SILENT, _ENTRIES):
            if self._words[index] in {0, mark}:
                self._words[index] = mark
                return

    def says_silent(self, node: str) -> bool:
        return bool(self._words[_SILENT]) and _mark(node) in self._words[_SILENT:_ENTRIES]

    def release(self) -> None:
        self._words.release()


def _check_of(number: int, piece: memoryview) -> int:
    """A CRC32C that begins with the piece's number: of a torn entry that may be of another piece than the rest of it."""
    return crc32c(piece, number & 0xFFFFFFFF)


def _mark(node: str) -> int:
    return 1 << 32 | crc32c(node.encode())


class _Shape:
    """Where what lies in a cache's file."""

    def __init__(self, ranks: int, slot_bytes: int) -> None:
        self.word_bytes = 8 * Board.word_count(ranks)
        self.header_bytes = -(-self.word_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slot_bytes = slot_bytes
        self.size_bytes = self.header_bytes + SLOTS * slot_bytes

    def board(self, mapped: mmap.mmap) -> Board:
        return Board(memoryview(mapped)[: self.word_bytes].cast("Q"))

    def slot(self, mapped: mmap.mmap, number: int) -> memoryview:
        start = self.header_bytes + (number % SLOTS) * self.slot_bytes
        return memoryview(mapped)[start : start + self.slot_bytes]


class RankCache:
    """This process's own cache. Its pieces are numbered from 0, in the order in which they were announced."""

    def __init__(self, path: Path, lock: DescriptorLock, memory: mmap.mmap, shape: _Shape) -> None:
        """A file that is named, locked and mapped: `create` makes it."""
        self._fd = lock.fd
        self._close = weakref.finalize(self, _remove, path, lock)
        self.name = path.name
        self._shape = shape
        self._map = memory
        self.board = shape.board(memory)
        self.board.pulse(time.monotonic_ns())

    @classmethod
    def create(cls, directory: Path, ranks: int, slot_bytes: int) -> Self:
        """`ranks`: of the load. When this returns the cache has its name, `name` in `directory`, until it is closed.

        Raises:
            OSError: no room, no right to write there, or nothing can be locked there.
        """
        sweep(directory)
        path, lock = _create_locked_file(directory)
        shape = _Shape(ranks, slot_bytes)
        try:
            os.ftruncate(lock.fd, shape.size_bytes)
            os.posix_fallocate(lock.fd, 0, shape.header_bytes)
            memory = mmap.mmap(lock.fd, shape.size_bytes)
        except OSError:
            _remove(path, lock)
            raise
        return cls(path, lock, memory, shape)

    def reserve(self, pieces: int) -> None:
        """Takes the room for so many pieces, or for as many as there are slots. Raises OSError."""
        if pieces:
            size_bytes = min(pieces, SLOTS) * self._shape.slot_bytes
            os.posix_fallocate(self._fd, self._shape.header_bytes, size_bytes)

    def slot(self, number: int) -> memoryview:
        """Where to put piece `number`, once no rank needs the piece that lies there."""
        return self._shape.slot(self._map, number)

    def put_piece(self, number: int, piece: memoryview | None) -> memoryview:
        """Gives piece `number` to the takers; returns it as it lies in its slot. None: each of them has to fetch it."""
        slot = self._shape.slot(self._map, number)
        if piece is None:
            self.board.set_entry(number, 0, 0, 0)
            return slot[:0]
        size = len(piece)
        begin = address_of(piece) - address_of(slot) if size else 0
        if not 0 <= begin <= len(slot) - size:
            slot[:size] = piece
            begin = 0
        given = slot[begin : begin + size]
        self.board.set_entry(number, begin, size, _check_of(number, given))
        return given

    def close(self) -> None:
        """Leaves, and takes the name away. A process that has opened the cache keeps what lies in it."""
        if self._close.alive:
            self.board.leave()
            self._close()
            self.board.release()
            with contextlib.suppress(BufferError):  # a thread still fetches into a slot: it goes with the last view
                self._map.close()


class OtherRankCache:
    """Another process's cache, as one of its takers sees it. Safe for concurrent use, but for `close`."""

    def __init__(self, fd: int, memory: mmap.mmap, shape: _Shape) -> None:
        """A file that is open and mapped: `open` does it."""
        self._fd = fd
        self._map = memory
        self._shape = shape
        self._lock = threading.Lock()
        self.board = shape.board(memory)

    @classmethod
    def open(cls, path: Path, ranks: int, slot_bytes: int) -> Self:
        """Raises OSError, ValueError: there is no such cache any more."""
        shape = _Shape(ranks, slot_bytes)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            memory = mmap.mmap(fd, shape.size_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, memory, shape)

    def is_locked(self) -> bool:
        """Whether its owner lives, and has not closed it. A process that is stopped lives."""
        with self._lock:
            return self._fd >= 0 and _is_locked(self._fd)

    def copy(self, number: int, memory: memoryview) -> memoryview | None:
        """Piece `number`, copied into `memory`; None: it does not lie there whole."""
        there, begin, size, crc = self.board.entry(number)
        if there != number or not 0 < size <= min(len(memory), self._shape.slot_bytes - begin):
            return None
        piece = memory[:size]
        piece[:] = self._shape.slot(self._map, number)[begin : begin + size]
        return piece if _check_of(number, piece) == crc else None

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1
        self.board.release()
        with contextlib.suppress(BufferError):  # a thread still looks at a word of it
            self._map.close()


def is_any_cache_locked(directory: Path) -> bool:
    """Whether a rank of this node has a cache, which it has while it may fetch from other nodes for a load."""
    return any(_is_file_locked(path) for path in directory.glob(f"{_PREFIX}*"))


def _is_file_locked(path: Path) -> bool:
    with contextlib.suppress(OSError), _open(path) as lock:
        return not lock.try_take(shared=True)
    return False


def _is_locked(fd: int) -> bool:
    """Whether another process holds the lock of this open file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _create_locked_file(directory: Path) -> tuple[Path, DescriptorLock]:
    """A new file, locked and named.

    In the instant before it is locked, a sweep takes it for one that was left behind: then another one is made.
    """
    for _ in range(_TRIES):
        path = directory / f"{_PREFIX}{uuid.uuid4().hex}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        lock, is_ours = DescriptorLock(fd), False
        try:
            is_ours = lock.try_take() and os.fstat(fd).st_nlink > 0
        finally:
            if not is_ours:
                lock.release()
                path.unlink(missing_ok=True)
        if is_ours:
            return path, lock
    raise OSError(errno.EAGAIN, "every new cache was swept away", str(directory))


def _remove(path: Path, lock: DescriptorLock) -> None:
    """Takes a cache's name away, then its lock. A process that was forked from its owner has neither."""
    if lock.is_locked:
        path.unlink(missing_ok=True)
    lock.release()


def sweep(directory: Path) -> None:
    """Removes the caches of processes that were killed: no process holds their lock."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _open(path) as lock:
            if lock.try_take():
                path.unlink(missing_ok=True)


def _open(path: Path) -> DescriptorLock:
    return DescriptorLock(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
