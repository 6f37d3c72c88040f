"""Reads the zip container that `torch.save` writes: finds its records through its directory, and checks them.

Nothing is unpacked or unpickled.

Source: PKWARE APPNOTE 6.3.10; torch.serialization (torch 2.7 to 2.15): records are stored uncompressed,
one after the other, in a folder whose name varies.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from fastcrc.crc32 import iso_hdlc

from replicated_ckpt.core.integrity.checksum import (
    FOOTER_TAIL_BYTES,
    MAGIC,
    BlockTable,
    decode_footer,
    first_bad_block,
    footer_bytes_of,
    size_with_footer,
)

Fetch = Callable[[int, int], memoryview]
"""Bytes [offset, offset + length) of the item; valid until the next call."""

_END = struct.Struct("<4s4H2LH")
_WIDE_END = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCATOR_BYTES = 20
_U16_MAX = 0xFFFF
_U32_MAX = 0xFFFFFFFF
_DIRECTORY_BYTES_MAX = 64 << 20
_NAME_CHARACTERS = 80


class ArchiveDamaged(ValueError):
    """Bytes begin like a zip container, but `torch.save` writes no such container.

    The message continues a sentence about the bytes, such as "It has records beyond its end".
    """


@dataclass(frozen=True)
class Record:
    """One record: its name without the folder, its CRC32 (0: not computed), and the place of its bytes."""

    name: str
    crc: int
    size: int
    start: int


def is_archive(fetch: Fetch, size_bytes: int) -> bool:
    """Whether an item begins like a zip container."""
    return size_bytes >= _END.size and bytes(fetch(0, 4)) == b"PK\x03\x04"


def find_records(fetch: Fetch, size_bytes: int) -> Mapping[str, Record]:
    """The records of an item by name. All lie inside the item, and do not overlap.

    Raises:
        ArchiveDamaged: the item is not such a container.
    """
    try:
        entries = list(_entries(fetch, size_bytes))
        found = {name: Record(name, crc, size, _start(fetch, header)) for name, crc, size, header in entries}
    except struct.error as exc:
        raise ArchiveDamaged(f"has a damaged zip directory: {exc}") from exc
    # torch's zip reader looks names up without case: two readers could read different records.
    if len({name.lower() for name in found}) != len(entries):
        raise ArchiveDamaged("has two records of the same name")
    end = 0
    for record in sorted(found.values(), key=lambda record: record.start):
        # Overlapping records let a small file expand to any size in memory.
        if record.start < end:
            raise ArchiveDamaged(f"has a record {record.name!r} that overlaps another one")
        end = record.start + record.size
    if end > size_bytes:
        raise ArchiveDamaged("has records beyond its end")
    return found


def within(raw: memoryview) -> Fetch:
    """Returns a `Fetch` that reads from memory."""

    def fetch(offset: int, length: int) -> memoryview:
        return raw[offset : offset + length]

    return fetch


def _entries(fetch: Fetch, size_bytes: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, CRC32, size and place of the local header of each record."""
    count, start, end = _directory(fetch, size_bytes)
    # A hostile directory may point anywhere, or claim gigabytes.
    if not 0 <= start <= end <= size_bytes or end - start > _DIRECTORY_BYTES_MAX:
        raise ArchiveDamaged("has its zip directory outside its bytes")
    raw = bytes(fetch(start, end - start)) if end > start else b""
    position = 0
    for _ in range(count):
        magic, _, _, _, method, _, _, crc, stored, plain, name_bytes, extra_bytes, comment_bytes, _, _, _, header = (
            _ENTRY.unpack_from(raw, position)
        )
        position += _ENTRY.size
        # torch names the folder after the file, so its name varies.
        name = raw[position : position + name_bytes].decode("utf-8", "replace").partition("/")[2]
        extra = raw[position + name_bytes : position + name_bytes + extra_bytes]
        plain, stored, header = _wide(extra, plain, stored, header)
        # torch.save never compresses; a compressed record may be a zip bomb.
        if magic != b"PK\x01\x02" or method != 0 or plain != stored or header + _LOCAL.size > size_bytes:
            raise ArchiveDamaged(f"has a record {name[:_NAME_CHARACTERS]!r} that torch.save would store differently")
        position += name_bytes + extra_bytes + comment_bytes
        yield name, crc, plain, header


def _directory(fetch: Fetch, size_bytes: int) -> tuple[int, int, int]:
    """The number of entries of the zip directory, its start and its end."""
    if size_bytes < _END.size:
        raise ArchiveDamaged("is not a zip container")
    magic, _, _, _, count, length, start, _ = _END.unpack(fetch(size_bytes - _END.size, _END.size))
    if magic != b"PK\x05\x06":
        raise ArchiveDamaged("does not end as a zip container")
    end = size_bytes - _END.size
    if _U32_MAX in (start, length) or count == _U16_MAX:
        position = end - _LOCATOR_BYTES - _WIDE_END.size
        if position < 0:
            raise ArchiveDamaged("has a truncated zip directory")
        count, length, start = _WIDE_END.unpack(fetch(position, _WIDE_END.size))[7:10]
    return count, start, start + length


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Sizes and offset of a record. Those that do not fit into 32 bits come from its ZIP64 field, in `extra`."""
    position, wide = 0, b""
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            wide = extra[position + 4 : position + 4 + size]
            break
        position += 4 + size
    found, used = [], 0
    for value in values:
        if value == _U32_MAX:
            (value,) = struct.unpack_from("<Q", wide, used)  # noqa: PLW2901 - this is the value
            used += 8
        found.append(value)
    return tuple(found)


def _start(fetch: Fetch, header: int) -> int:
    """Where a record's bytes begin, behind its local header."""
    # Lengths in the local header may differ from the directory's: the data begins behind the local one.
    fields = _LOCAL.unpack(fetch(header, _LOCAL.size))
    if fields[0] != b"PK\x03\x04":
        raise ArchiveDamaged("has a record that does not lie where its zip directory points")
    return int(header + _LOCAL.size + fields[9] + fields[10])


_PIECE_BYTES = 4 << 20


class Verdict(Enum):
    """The result of checking an item by the checksums inside it."""

    INTACT = "intact"
    """It is a complete zip container, and all its records match their CRC32."""
    UNCHECKED = "unchecked"
    """It is not a zip container, or its records have no CRC32: it cannot be checked."""


class ItemDamaged(ValueError):
    """An item begins like a zip container, but is damaged, or a record differs from its CRC32."""


def check_range(fetch: Fetch, size_bytes: int, *, must_check: bool = False) -> Verdict:
    """Reads one item of `size_bytes` and checks it by its own CRC32s.

    `must_check`: an item that cannot be checked counts as damaged, because the footer of its shard is damaged.

    Raises:
        ItemDamaged: with the expected and found values; with `must_check` also if the item cannot be checked.
    """
    verdict = _check_item(fetch, size_bytes)
    if must_check and verdict is Verdict.UNCHECKED:
        raise ItemDamaged("the shard's footer of checksums is damaged, and the item has none of its own")
    return verdict


def _check_item(fetch: Fetch, size_bytes: int) -> Verdict:
    if not is_archive(fetch, size_bytes):
        return Verdict.UNCHECKED
    try:
        records = find_records(fetch, size_bytes).values()
    except ArchiveDamaged as exc:
        raise ItemDamaged(f"it {exc}") from exc
    # All zero: torch.save ran with set_crc32_options(False).
    if not any(record.crc for record in records):
        return Verdict.UNCHECKED
    for record in records:
        found = _crc_of(fetch, record)
        if found != record.crc:
            raise ItemDamaged(f"record {record.name[:80]!r}: expected CRC32 {record.crc:08x}, found {found:08x}")
    return Verdict.INTACT


def _crc_of(fetch: Fetch, record: Record) -> int:
    crc = 0
    for offset in range(0, record.size, _PIECE_BYTES):
        piece = fetch(record.start + offset, min(_PIECE_BYTES, record.size - offset))
        crc = int(iso_hdlc(piece, crc))
    return crc


@dataclass(frozen=True)
class OwnFooter:
    """The footer of a file. `table` None: the file has no footer or, with `is_damaged`, a damaged one."""

    table: BlockTable | None = None
    is_damaged: bool = False


def find_footer(fetch: Fetch, size_bytes: int, items_end: int | None = None) -> OwnFooter:
    """The footer of a file, recognized by its last bytes.

    `items_end`: the end of the last item. If the last bytes are damaged, the file's size shows whether a footer follows.
    """
    # Stock torch writes an empty file for a rank without items.
    if size_bytes < FOOTER_TAIL_BYTES:
        return OwnFooter()
    tail = fetch(size_bytes - FOOTER_TAIL_BYTES, FOOTER_TAIL_BYTES)
    # The damage may lie in the magic itself: then only the size shows that there was a footer.
    is_as_long = items_end is not None and size_bytes == size_with_footer(items_end)
    if bytes(tail[: len(MAGIC)]) != MAGIC and not is_as_long:
        return OwnFooter()
    footer_bytes = footer_bytes_of(tail, size_bytes) or 0
    table = decode_footer(fetch(size_bytes - footer_bytes, footer_bytes), size_bytes)
    return OwnFooter(table, is_damaged=table is None)


def check_blocks(fetch: Fetch, table: BlockTable) -> None:
    """Reads all data of a file and compares it with its footer.

    Raises:
        ItemDamaged: a block differs from its checksum.
    """
    at_once = max(1, _PIECE_BYTES // table.block_bytes)
    for first in range(0, len(table.crcs), at_once):
        start = first * table.block_bytes
        piece = fetch(start, min(at_once * table.block_bytes, table.data_bytes - start))
        problem = first_bad_block(piece, table, first)
        if problem is not None:
            raise ItemDamaged(problem)
