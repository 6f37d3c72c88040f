"""The CRC32 that `torch.save` leaves in the zip container of each item: a check of bytes nobody else took checksums of.

Source: PKWARE APPNOTE 6.3.10; torch.serialization (torch 2.7 to 2.15): records are stored, not compressed, and their
CRC32 is 0 where `torch.serialization.set_crc32_options(False)` was in force.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from fastcrc.crc32 import iso_hdlc

Fetch = Callable[[int, int], memoryview]
"""Bytes [offset, offset + length) of the item; valid until the next call."""

_PIECE_BYTES = 4 << 20
_EOCD = struct.Struct("<4s4H2LH")
_ZIP64_EOCD = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCATOR_BYTES = 20
_U16_MAX = 0xFFFF
_U32_MAX = 0xFFFFFFFF
_DIRECTORY_BYTES_MAX = 64 << 20


class Verdict(Enum):
    """What the checksums inside an item say of it."""

    INTACT = "intact"
    """It is a zip container, whole, and all its records match their CRC32."""
    UNCHECKED = "unchecked"
    """It is none, or one without CRC32: nobody can tell."""


@dataclass(frozen=True)
class _Record:
    name: str
    crc: int
    size: int
    header: int


class ItemDamaged(ValueError):
    """An item begins as a zip container and is not one, or a record differs from its CRC32."""


def checked_item(fetch: Fetch, size_bytes: int) -> Verdict:
    """Reads one item of `size_bytes` and holds it against what is in it.

    Raises:
        ItemDamaged: with what was expected and found.
    """
    if size_bytes < _EOCD.size or bytes(fetch(0, 4)) != b"PK\x03\x04":
        return Verdict.UNCHECKED
    try:
        records = list(_records(fetch, size_bytes))
    except struct.error as exc:
        raise ItemDamaged(f"its zip directory is damaged: {exc}") from exc
    if not any(record.crc for record in records):
        return Verdict.UNCHECKED
    for record in records:
        found = _crc_of(fetch, record, size_bytes)
        if found != record.crc:
            raise ItemDamaged(f"record {record.name!r}: expected CRC32 {record.crc:08x}, found {found:08x}")
    return Verdict.INTACT


def _records(fetch: Fetch, size_bytes: int) -> Iterator[_Record]:
    count, start, end = _directory(fetch, size_bytes)
    if not 0 <= start <= end <= size_bytes or end - start > _DIRECTORY_BYTES_MAX:
        raise ItemDamaged("its zip directory lies outside it")
    raw = bytes(fetch(start, end - start)) if end > start else b""
    position = 0
    for _ in range(count):
        fields = _ENTRY.unpack_from(raw, position)
        crc, stored, plain, name_bytes, extra_bytes, comment_bytes, header = (
            *fields[7:13],
            fields[16],
        )
        position += _ENTRY.size
        name = raw[position : position + name_bytes].decode("utf-8", "replace")
        extra = raw[position + name_bytes : position + name_bytes + extra_bytes]
        plain, stored, header = _wide(extra, plain, stored, header)
        if fields[0] != b"PK\x01\x02" or fields[4] != 0 or plain != stored:
            raise ItemDamaged(f"record {name[:80]!r} of its zip directory is not as torch.save writes it")
        position += name_bytes + extra_bytes + comment_bytes
        yield _Record(name[:80], crc, plain, header)


def _directory(fetch: Fetch, size_bytes: int) -> tuple[int, int, int]:
    """Number of entries, start and end of the central directory."""
    magic, _, _, _, count, length, start, _ = _EOCD.unpack(fetch(size_bytes - _EOCD.size, _EOCD.size))
    if magic != b"PK\x05\x06":
        raise ItemDamaged("it begins as a zip container and does not end as one")
    end = size_bytes - _EOCD.size
    if _U32_MAX in (start, length) or count == _U16_MAX:
        position = end - _LOCATOR_BYTES - _ZIP64_EOCD.size
        if position < 0:
            raise ItemDamaged("its zip directory is cut off")
        wide = _ZIP64_EOCD.unpack(fetch(position, _ZIP64_EOCD.size))
        count, length, start = wide[7:10]
    return count, start, start + length


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Sizes and offset, those that do not fit into 32 bits taken from the record's ZIP64 field."""
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


def _crc_of(fetch: Fetch, record: _Record, size_bytes: int) -> int:
    if record.header + _LOCAL.size > size_bytes:
        raise ItemDamaged(f"record {record.name!r} lies outside it")
    head = _LOCAL.unpack(fetch(record.header, _LOCAL.size))
    start = record.header + _LOCAL.size + head[9] + head[10]
    if head[0] != b"PK\x03\x04" or start + record.size > size_bytes:
        raise ItemDamaged(f"record {record.name!r} does not lie where its zip directory says")
    crc = 0
    for offset in range(0, record.size, _PIECE_BYTES):
        piece = fetch(start + offset, min(_PIECE_BYTES, record.size - offset))
        crc = int(iso_hdlc(piece, crc))
    return crc
