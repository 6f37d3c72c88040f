"""A spool: verified pieces that one process of a node has fetched, for other processes of the node to take.

A file in the agent's directory, mapped by all of them: a few slots, used in turn. Its header has a pulse (the process
lives and waits or works), how many pieces were put, whether it is closed, how far each taker has come, and for each slot
which piece lies there, its size and its CRC32C, which every taker compares. A slot is used again only when all takers of
its piece have said that they are done with it; so a taker that is stopped and goes on never meets other bytes.
"""

import contextlib
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

from replicated_ckpt.core.checksum import crc32c
from replicated_ckpt.stores.address import address_of

SLOTS = 4
PATIENCE_S = 10.0
"""Without a sign of life for so long, another process is not waited for any more."""
_PREFIX = "spool-"
_PULSE, _PUT, _CLOSED, _TAKERS = 1, 2, 3, 8
_SLOT_WORDS = 4
_POLL_S = 0.0005
_POLL_MAX_S = 0.01


class Pause:
    """Waits that grow from half a millisecond to ten."""

    def __init__(self) -> None:
        self._pause_s = _POLL_S

    def __call__(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _POLL_MAX_S)


class _Mapped:
    """A spool's file in memory."""

    def __init__(self, fd: int, takers: int, slot_bytes: int) -> None:
        words = _TAKERS + takers + _SLOT_WORDS * SLOTS
        self._header_bytes = -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = slot_bytes
        self.size_bytes = self._header_bytes + SLOTS * slot_bytes
        if os.fstat(fd).st_size == 0:
            os.posix_fallocate(fd, 0, self.size_bytes)
        self._map = mmap.mmap(fd, self.size_bytes)
        self.words = memoryview(self._map).cast("Q")
        self._slot_words = _TAKERS + takers

    def slot(self, index: int) -> memoryview:
        start = self._header_bytes + (index % SLOTS) * self._slot_bytes
        return memoryview(self._map)[start : start + self._slot_bytes]

    def entry(self, index: int) -> tuple[int, int, int, int]:
        """Of the slot of piece `index`: number of the piece in it plus one, where it begins there, its size, its CRC32C."""
        start = self._slot_words + _SLOT_WORDS * (index % SLOTS)
        number, begin, size_bytes, crc = self.words[start : start + _SLOT_WORDS]
        return number, begin, size_bytes, crc

    def set_entry(self, index: int, begin: int, size_bytes: int, crc: int) -> None:
        start = self._slot_words + _SLOT_WORDS * (index % SLOTS)
        self.words[start + 1] = begin
        self.words[start + 2] = size_bytes
        self.words[start + 3] = crc
        self.words[start] = index + 1

    def close(self) -> None:
        self.words.release()
        with contextlib.suppress(BufferError):  # somebody still looks at a slot: it goes with the last view
            self._map.close()


def spool_path(directory: Path, nonce: str, rank: int) -> Path:
    return directory / f"{_PREFIX}{nonce}-{rank}"


class Spool:
    """This process's own spool. Pieces are numbered in the order in which they are announced, from 0."""

    def __init__(self, path: Path, takers: int, slot_bytes: int) -> None:
        """Raises OSError: no room, or no right to write there."""
        _sweep(path.parent)
        self._path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._lock_fd = os.dup(fd)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mapped = _Mapped(fd, takers, slot_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def pulse(self) -> None:
        self._mapped.words[_PULSE] += 1

    def slot(self, index: int) -> memoryview:
        """Where to put piece `index`; only once `is_free`."""
        return self._mapped.slot(index)

    def has_taken(self, taker: int, index: int) -> bool:
        return self._mapped.words[_TAKERS + taker] > index

    def take_own(self, taker: int, index: int) -> None:
        """The owner is a taker, too: it needs nothing before piece `index + 1` any more."""
        self._mapped.words[_TAKERS + taker] = index + 1

    def put(self, index: int, piece: memoryview | None) -> None:
        """Gives piece `index` to the takers; it lies in its slot or is copied there. None: they have to fetch it."""
        begin = size = crc = 0
        if piece is not None:
            slot, size = self._mapped.slot(index), len(piece)
            begin = address_of(piece) - address_of(slot)
            if not 0 <= begin <= len(slot) - size:
                slot[:size] = piece
                begin = 0
            crc = crc32c(slot[begin : begin + size])
        self._mapped.set_entry(index, begin, size, crc)
        self._mapped.words[_PUT] += 1

    def close_for_others(self) -> None:
        """Nothing more will be put."""
        self._mapped.words[_CLOSED] = 1

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._mapped.close()
        os.close(self._lock_fd)


class TakenSpool:
    """Another process's spool, seen by one of its takers. One thread, but for `lives`."""

    def __init__(self, path: Path, taker: int, takers: int, slot_bytes: int) -> None:
        self._path = path
        self._taker = taker
        self._shape = (takers, slot_bytes)
        self._mapped: _Mapped | None = None
        self._sign_by_word = dict.fromkeys((_PULSE, _PUT), (-1, time.monotonic()))
        self._is_given_up = False
        self._lock = threading.Lock()

    def _opened(self) -> _Mapped | None:
        with self._lock:
            if self._mapped is None:
                with contextlib.suppress(OSError, ValueError):
                    self._mapped = self._map()
            return self._mapped

    def _map(self) -> _Mapped | None:
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _Mapped(fd, *self._shape) if os.fstat(fd).st_size else None
        finally:
            os.close(fd)

    def _shows(self, word: int) -> bool:
        """Whether `word` has changed within the last PATIENCE_S."""
        mapped = self._opened()
        value = -1 if mapped is None else mapped.words[word]
        last, since = self._sign_by_word[word]
        if value != last:
            since = time.monotonic()
            self._sign_by_word[word] = (value, since)
        return time.monotonic() - since < PATIENCE_S

    def lives(self) -> bool:
        """Whether its process gave a sign of life lately."""
        return self._shows(_PULSE)

    def peek(self, index: int) -> memoryview | bool | None:
        """Piece `index`; None while it is not there yet; False if it will not come, and has to be fetched."""
        if self._is_given_up:
            return False
        mapped = self._opened()
        if mapped is not None:
            number, begin, size, crc = mapped.entry(index)
            if number == index + 1:
                piece = mapped.slot(index)[begin : begin + size]
                return piece if size and crc32c(piece) == crc else False
            if mapped.words[_CLOSED]:
                return False
        if not self._shows(_PUT):
            self._is_given_up = True
            return False
        return None

    def taken(self, index: int) -> None:
        """Nothing before piece `index + 1` is needed here any more."""
        if self._mapped is not None:
            self._mapped.words[_TAKERS + self._taker] = index + 1

    def wait_begins(self) -> None:
        """Signs of life count from now on."""
        self._sign_by_word[_PUT] = (self._sign_by_word[_PUT][0], time.monotonic())

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _sweep(directory: Path) -> None:
    """Removes the spools of processes that were killed: nobody holds their lock."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(fd)
