"""Verified reads: the bytes of a shard, believed only block by block, wherever they come from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from replicated_ckpt.core.integrity.checksum import (
    FOOTER_TAIL_BYTES,
    BlockHasher,
    BlockTable,
    decode_footer,
    first_bad_block,
    footer_bytes_of,
    tables_of_size,
    usual_footer_bytes,
)
from replicated_ckpt.errors import ObjectCorrupt

SCRATCH_BYTES = 17 << 20
"""At most so much is kept between reads; a larger read gets memory of its own."""
FIRST_FOOTER_BYTES = 64 << 10
"""So much of the end of a file is read at once at most, before its footer says how long that is: up to 4 GB of data."""
REBUILD_BYTES = 4 << 20
"""Read at once where a footer is made anew."""


@dataclass(frozen=True)
class Expected:
    """Size and CRC32C of the whole shard file, as the manifest has them.

    A source whose own footer is damaged is opened without it: with the `table` that another source has shown, or, with
    `has_damaged_footer`, with one made anew from all of its data.
    """

    size_bytes: int
    crc32c: int
    table: BlockTable | None = None
    has_damaged_footer: bool = False

    @property
    def needs_footer(self) -> bool:
        """Whether the source is to be opened by its own footer, so that its file must have the right size."""
        return self.table is None and not self.has_damaged_footer


class TooSlow(TimeoutError):
    """A source sends, and so slowly that others are asked before it."""


class VerifiedShard(ABC):
    """One shard at one source: made, opened, read, closed.

    `table` holds the checksums of its blocks, 4 bytes of memory for each, from `open` on.
    """

    table: BlockTable

    def __init__(self, store: str, name: str, expected: Expected) -> None:
        self._store = store
        self._name = name
        self._expected = expected
        self._scratch = memoryview(b"")
        self.bytes_read = 0

    def open(self) -> Self:
        """Reads the footer and checks it against the manifest: a swapped, stale or truncated file is noticed by it.

        Raises:
            ObjectCorrupt: the footer is, twice in a row, not the one that was saved, and it is needed; or none that is
                made from the data is. And what the source raises. The shard is closed then.
        """
        expected = self._expected
        try:
            self._connect()
            if expected.table is not None:
                self.table = expected.table
            else:
                self.table = (
                    self._rebuild_table(expected) if expected.has_damaged_footer else self._read_table(expected)
                )
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self) -> None:  # noqa: B027 - most sources have nothing to open
        """Opens what reading needs; refuses what the source shows to be wrong before a byte of it is read."""

    def _rebuild_table(self, expected: Expected) -> BlockTable:
        """The table of the data as it is here, believed if it is the one that was saved."""
        try:
            tail = bytes(self._fetch(max(0, expected.size_bytes - FOOTER_TAIL_BYTES), expected.size_bytes))
        except ObjectCorrupt:
            tail = b""  # the file ends before
        for block_bytes, data_bytes in tables_of_size(tail, expected.size_bytes):
            hasher = BlockHasher(block_bytes)
            for offset in range(0, data_bytes, REBUILD_BYTES):
                piece = self._reuse(min(REBUILD_BYTES, data_bytes - offset))
                self._fill(piece, offset)
                hasher.update(piece)
            table = hasher.table()
            if table.file_crc() == expected.crc32c:
                return table
        raise self._corrupt("its footer of block checksums is damaged, and its data is not all intact")

    @abstractmethod
    def _fill(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the file's bytes from `offset` on, or raises a StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the source holds open."""

    def _fetch(self, start: int, end: int) -> memoryview:
        target = memoryview(bytearray(end - start))
        if target:
            self._fill(target, start)
        return target

    def _reuse(self, size_bytes: int, lent: memoryview | None = None) -> memoryview:
        """Memory for one read: `lent` if it is large enough; fresh memory would cost more than the read, in page faults."""
        self.bytes_read += size_bytes
        if lent is not None and len(lent) >= size_bytes:
            return lent[:size_bytes]
        if len(self._scratch) < size_bytes:
            self._scratch = self._allocate(size_bytes)
        span = self._scratch[:size_bytes]
        if len(self._scratch) > SCRATCH_BYTES:
            self._scratch = memoryview(b"")
        return span

    def _allocate(self, size_bytes: int) -> memoryview:
        try:
            return memoryview(bytearray(size_bytes))
        except MemoryError as exc:
            raise self._corrupt(f"an item of {size_bytes} bytes is more than there is memory for") from exc

    def take_bytes_read(self) -> int:
        """Bytes read since this was last asked, those that turned out to be bad, too."""
        count, self.bytes_read = self.bytes_read, 0
        return count

    def _read_table(self, expected: Expected) -> BlockTable:
        """The table in the footer. A damaged one is read a second time before it counts."""
        size = expected.size_bytes
        raw = bytearray(min(usual_footer_bytes(size), FIRST_FOOTER_BYTES))
        if len(raw) < FOOTER_TAIL_BYTES:
            raise self._corrupt("its footer of block checksums is damaged")
        for is_last in (False, True):
            try:
                self._fill(memoryview(raw), size - len(raw))
                footer = bytearray(footer_bytes_of(raw[-FOOTER_TAIL_BYTES:], size) or 0)
                if len(footer) == len(raw):
                    footer = raw
                elif footer:
                    self._fill(memoryview(footer), size - len(footer))
                return self._check_footer(footer, expected)
            except ObjectCorrupt:
                if is_last:
                    raise
        raise AssertionError("the second attempt returns or raises")

    def _check_footer(self, footer: bytearray, expected: Expected) -> BlockTable:
        table = decode_footer(footer, expected.size_bytes)
        if table is None:
            raise self._corrupt("its footer of block checksums is damaged")
        found = table.file_crc()
        if found != expected.crc32c:
            raise self._corrupt(f"expected CRC32C {expected.crc32c:08x}, its blocks' checksums combine to {found:08x}")
        return table

    def read(self, offset: int, length: int, lent: memoryview | None = None) -> memoryview:
        """Bytes [offset, offset + length) of the data, verified. A bad block is read a second time before it counts.

        They lie in `lent`, if the whole blocks that they touch fit into it. Else in memory that is reused: they are there
        until the next read of this shard. Nothing else is ever given out; but what `lent` holds when this raises was not
        verified.

        Raises:
            ObjectCorrupt: a block differs from its checksum twice in a row, or the range lies outside the data.
        """
        table = self.table
        if length < 0 or offset < 0 or offset + length > table.data_bytes:
            raise self._corrupt(f"bytes {offset} to {offset + length} lie outside its {table.data_bytes} bytes of data")
        first, last = table.covering(offset, length)
        start, end = first * table.block_bytes, min(last * table.block_bytes, table.data_bytes)
        problem = None
        for _ in range(2):
            span = self._reuse(end - start, lent)
            if span:
                self._fill(span, start)
            problem = first_bad_block(span, table, first)
            if problem is None:
                return span[offset - start : offset - start + length]
        raise self._corrupt(str(problem))

    def _corrupt(self, detail: str) -> ObjectCorrupt:
        return ObjectCorrupt(self._store, "read", self._name, detail)
