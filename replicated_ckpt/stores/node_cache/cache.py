"""A cache: verified pieces that one process of a node has fetched, for the node's other processes.

The cache is a file in the agent's directory, mapped by all of them. Only its owner writes it: a few slots, used in turn,
and a board of words with the owner's state. Each taker copies a piece and verifies the copy's checksum. So it never uses
wrong bytes, even if the owner overwrites the slot meanwhile. The owner locks the file for its lifetime.
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
"""A count above the pieces of any cache. A process that takes no more pieces records it as passed."""
_PREFIX = "cache-"
_TRIES = 16
_PULSE, _LEFT, _SILENT, _ENTRIES = 0, 1, 2, 10
"""Indexes of the first words on a board: the pulse, whether the owner has left, silent nodes, the entries of the slots."""
_ENTRY_WORDS = 4


class Board:
    """The words of one cache. Only single words are atomic: each process reads the last value that the owner wrote.

    An entry has the number of the piece in a slot, its begin, size and checksum. The checksum detects a torn entry.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._passed = _ENTRIES + _ENTRY_WORDS * SLOTS

    @staticmethod
    def word_count(ranks: int) -> int:
        return _ENTRIES + _ENTRY_WORDS * SLOTS + ranks

    @property
    def pulse_ns(self) -> int:
        """When the owner last worked or waited for a source, not for a rank, by the host's monotonic clock."""
        return int(self._words[_PULSE])

    def pulse(self, at_ns: int) -> None:
        self._words[_PULSE] = max(at_ns, self.pulse_ns)

    @property
    def has_left(self) -> bool:
        """Whether the owner neither adds nor takes any more pieces."""
        return bool(self._words[_LEFT])

    def leave(self) -> None:
        self._words[_LEFT] = 1

    def count_passed(self, fetcher: int) -> int:
        """How many of the first pieces of rank `fetcher`'s cache the owner no longer needs; -1: it is not opened yet."""
        return int(self._words[self._passed + fetcher]) - 1

    def pass_pieces(self, fetcher: int, count: int) -> None:
        self._words[self._passed + fetcher] = count + 1

    def entry(self, number: int) -> tuple[int, int, int, int]:
        """The entry of piece `number`'s slot: the number of the piece in it or -1, its begin, size and checksum."""
        start = _ENTRIES + _ENTRY_WORDS * (number % SLOTS)
        there, begin, size_bytes, crc = self._words[start : start + _ENTRY_WORDS]
        return there - 1, begin, size_bytes, crc

    def set_entry(self, number: int, begin: int, size_bytes: int, crc: int) -> None:
        start = _ENTRIES + _ENTRY_WORDS * (number % SLOTS)
        self._words[start + 1] = begin
        self._words[start + 2] = size_bytes
        self._words[start + 3] = crc
        # Last: a taker that sees the number finds begin, size and checksum already written.
        self._words[start] = number + 1

    def mark_silent(self, node: str) -> None:
        """Marks `node` as silent for the node's other ranks. Without a free word it does nothing."""
        mark = _mark(node)
        for index in range(_SILENT, _ENTRIES):
            if self._words[index] in {0, mark}:
                self._words[index] = mark
                return

    def is_marked_silent(self, node: str) -> bool:
        return bool(self._words[_SILENT]) and _mark(node) in self._words[_SILENT:_ENTRIES]

    def release(self) -> None:
        self._words.release()


def _check_of(number: int, piece: memoryview) -> int:
    """A CRC32C that covers the piece's number, too: a torn entry may have another piece's number."""
    return crc32c(piece, number & 0xFFFFFFFF)


def _mark(node: str) -> int:
    return 1 << 32 | crc32c(node.encode())


class _Shape:
    """The layout of a cache's file."""

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
    """This process's own cache. Its pieces are numbered from 0, in the order in which all ranks take them."""

    def __init__(self, path: Path, lock: DescriptorLock, memory: mmap.mmap, shape: _Shape) -> None:
        """Takes a file that `create` has named, locked and mapped."""
        self._fd = lock.fd
        self._close = weakref.finalize(self, _remove, path, lock)
        self.name = path.name
        self._shape = shape
        self._map = memory
        self.board = shape.board(memory)
        self.board.pulse(time.monotonic_ns())

    @classmethod
    def create(cls, directory: Path, ranks: int, slot_bytes: int) -> Self:
        """Makes a cache for a load of `ranks` ranks. It has the name `name` in `directory` until it is closed.

        Raises:
            OSError: no room, no permission to write there, or no locks there.
        """
        sweep(directory)
        path, lock = _create_locked_file(directory)
        shape = _Shape(ranks, slot_bytes)
        try:
            os.ftruncate(lock.fd, shape.size_bytes)
            # A write to a mapped page without room on the disk kills the process by SIGBUS.
            os.posix_fallocate(lock.fd, 0, shape.header_bytes)
            memory = mmap.mmap(lock.fd, shape.size_bytes)
        except OSError:
            _remove(path, lock)
            raise
        return cls(path, lock, memory, shape)

    def reserve(self, pieces: int) -> None:
        """Allocates room for `pieces` pieces, at most for all slots. Raises OSError."""
        if pieces:
            size_bytes = min(pieces, SLOTS) * self._shape.slot_bytes
            os.posix_fallocate(self._fd, self._shape.header_bytes, size_bytes)

    def slot(self, number: int) -> memoryview:
        """The memory for piece `number`. The caller ensures that no rank needs the piece that is in it now."""
        return self._shape.slot(self._map, number)

    def put_piece(self, number: int, piece: memoryview | None) -> memoryview:
        """Publishes piece `number` to the takers, and returns its memory in the slot. None: each taker must fetch it."""
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
        """Leaves, and removes the name. Processes that have opened the cache can still read its pieces."""
        if self._close.alive:
            self.board.leave()
            self._close()
            self.board.release()
            # BufferError: a thread still fetches into a slot. The mapping ends with the last view.
            with contextlib.suppress(BufferError):
                self._map.close()


class OtherRankCache:
    """Another process's cache, for one of its takers. Safe for concurrent use, except `close`."""

    def __init__(self, fd: int, memory: mmap.mmap, shape: _Shape) -> None:
        """Takes a file that `open` has opened and mapped."""
        self._fd = fd
        self._map = memory
        self._shape = shape
        self._lock = threading.Lock()
        self.board = shape.board(memory)

    @classmethod
    def open(cls, path: Path, ranks: int, slot_bytes: int) -> Self:
        """Opens a cache. Raises OSError, ValueError: it was removed."""
        shape = _Shape(ranks, slot_bytes)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            memory = mmap.mmap(fd, shape.size_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, memory, shape)

    def is_locked(self) -> bool:
        """Whether its owner is alive and has not closed it. A stopped process is alive."""
        with self._lock:
            return self._fd >= 0 and _is_locked(self._fd)

    def copy(self, number: int, memory: memoryview) -> memoryview | None:
        """Piece `number`, copied into `memory` and verified; None: the slot does not have the whole piece."""
        there, begin, size, crc = self.board.entry(number)
        if there != number or not 0 < size <= min(len(memory), self._shape.slot_bytes - begin):
            return None
        piece = memory[:size]
        # Copy, then verify the copy: the owner may overwrite the slot at any time.
        piece[:] = self._shape.slot(self._map, number)[begin : begin + size]
        return piece if _check_of(number, piece) == crc else None

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1
        self.board.release()
        with contextlib.suppress(BufferError):  # a thread still reads a word of it
            self._map.close()


def is_any_cache_locked(directory: Path) -> bool:
    """Whether a rank of this node has a cache. A rank has one while it may fetch from other nodes for a load."""
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

    Before it is locked, `sweep` of another process may remove it as a dead process's. Then another file is made.
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
    raise OSError(errno.EAGAIN, "another process deleted every new cache", str(directory))


def _remove(path: Path, lock: DescriptorLock) -> None:
    """Removes a cache's name, then its lock. Does neither in a process that was forked from its owner."""
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
