"""Verified reads: each block of a shard is checked before any of its bytes is returned, from any source."""

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
"""Memory kept between reads, at most; a larger read allocates its own."""
FIRST_FOOTER_BYTES = 64 << 10
"""Limit of the first read of a file's end, before the footer's length is known: enough for 4 GB of data."""
REBUILD_BYTES = 4 << 20
"""Size of the pieces in which a shard is read to recompute its footer."""


@dataclass(frozen=True)
class Expected:
    """Size and CRC32C of the whole shard file, as the manifest has them.

    A source with a damaged footer is opened with the `table` of another source. With `has_damaged_footer` it is opened
    with a table that is recomputed from all of its data.
    """

    size_bytes: int
    crc32c: int
    table: BlockTable | None = None
    has_damaged_footer: bool = False

    @property
    def needs_footer(self) -> bool:
        """Whether the source is opened by its own footer, which requires that its file has the right size."""
        return self.table is None and not self.has_damaged_footer


class TooSlow(TimeoutError):
    """A source sends, but so slowly that other sources are asked first."""


class VerifiedShard(ABC):
    """One shard at one source: it is opened, read any number of times, and closed.

    After `open`, `table` holds the checksums of its blocks, in 4 bytes of memory each.
    """

    table: BlockTable

    def __init__(self, store: str, name: str, expected: Expected) -> None:
        self._store = store
        self._name = name
        self._expected = expected
        self._scratch = memoryview(b"")
        self.bytes_read = 0

    def open(self) -> Self:
        """Reads the footer and compares it with the manifest, which detects a swapped, stale or truncated file.

        Raises:
            ObjectCorrupt: the footer, read twice, or the one recomputed from the data, is not the saved one. Also the
                source's own errors. After an error the shard is closed.
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
        """Opens the source. Raises, before a byte is read, if it has the wrong shard, for example one of another size."""

    def _rebuild_table(self, expected: Expected) -> BlockTable:
        """The table recomputed from the data here. It is returned only if it matches the saved checksum."""
        try:
            tail = bytes(self._fetch(max(0, expected.size_bytes - FOOTER_TAIL_BYTES), expected.size_bytes))
        except ObjectCorrupt:
            tail = b""  # a truncated file: its end, and the block size in it, are missing
        # The block size may be damaged, too: try each one that gives a file of this size.
        for block_bytes, data_bytes in tables_of_size(tail, expected.size_bytes):
            hasher = BlockHasher(block_bytes)
            for offset in range(0, data_bytes, REBUILD_BYTES):
                piece = self._reuse(min(REBUILD_BYTES, data_bytes - offset))
                self._fill(piece, offset)
                hasher.update(piece)
            table = hasher.table()
            if table.file_crc() == expected.crc32c:
                return table
        raise self._corrupt("its footer of block checksums is damaged, and not all of its data is intact")

    @abstractmethod
    def _fill(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the file's bytes from `offset` on, or raises a StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Closes the source's files and connections."""

    def _fetch(self, start: int, end: int) -> memoryview:
        target = memoryview(bytearray(end - start))
        if target:
            self._fill(target, start)
        return target

    def _reuse(self, size_bytes: int, lent: memoryview | None = None) -> memoryview:
        """Memory for one read: `lent` if it is large enough, else memory of earlier reads, to save page faults."""
        self.bytes_read += size_bytes
        if lent is not None and len(lent) >= size_bytes:
            return lent[:size_bytes]
        if len(self._scratch) < size_bytes:
            self._scratch = self._allocate(size_bytes)
        span = self._scratch[:size_bytes]
        if len(self._scratch) > SCRATCH_BYTES:  # one huge item must not stay in memory for the whole load
            self._scratch = memoryview(b"")
        return span

    def _allocate(self, size_bytes: int) -> memoryview:
        try:
            return memoryview(bytearray(size_bytes))
        except MemoryError as exc:
            raise self._corrupt(f"an item of {size_bytes} bytes does not fit into memory") from exc

    def take_bytes_read(self) -> int:
        """Bytes read since the last call, bad ones included."""
        count, self.bytes_read = self.bytes_read, 0
        return count

    def _read_table(self, expected: Expected) -> BlockTable:
        """The table in the footer. A damaged footer is read a second time before the shard counts as damaged."""
        size = expected.size_bytes
        # Bounded: the size comes from a manifest, and a damaged manifest must not make this allocate gigabytes.
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
        # The footer may be intact and of another file: a stale shard, or one swapped with it.
        found = table.file_crc()
        if found != expected.crc32c:
            raise self._corrupt(f"expected CRC32C {expected.crc32c:08x}, its blocks' checksums combine to {found:08x}")
        return table

    def read(self, offset: int, length: int, lent: memoryview | None = None) -> memoryview:
        """Bytes [offset, offset + length) of the data, verified. A bad block is read a second time before it is an error.

        They lie in `lent`, if the whole blocks that they touch fit into it; else in memory that the next read of this
        shard overwrites. Unverified bytes are never returned, but `lent` may hold some after an error.

        Raises:
            ObjectCorrupt: a block differs from its checksum twice in a row, or the range lies outside the data.
        """
        table = self.table
        if length < 0 or offset < 0 or offset + length > table.data_bytes:
            raise self._corrupt(f"bytes {offset} to {offset + length} lie outside its {table.data_bytes} bytes of data")
        first, last = table.covering(offset, length)
        start, end = first * table.block_bytes, min(last * table.block_bytes, table.data_bytes)
        problem = None
        # A flip in memory or on the wire is gone at the second read; damage on the disk stays.
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
