"""The CRC32 that `torch.save` leaves in the zip container of each item: a check of bytes that have no other checksum.

Source: torch.serialization (torch 2.7 to 2.15): the CRC32 of records is 0 where
`torch.serialization.set_crc32_options(False)` was in force.
"""

from enum import Enum

from fastcrc.crc32 import iso_hdlc

from replicated_ckpt.core.integrity.archive import ArchiveDamaged, Fetch, Record, find_records, is_archive

_PIECE_BYTES = 4 << 20


class Verdict(Enum):
    """What the checksums inside an item say of it."""

    INTACT = "intact"
    """It is a zip container, whole, and all its records match their CRC32."""
    UNCHECKED = "unchecked"
    """It is none, or one without CRC32: that cannot be told."""


class ItemDamaged(ValueError):
    """An item begins as a zip container and is not one, or a record differs from its CRC32."""


def check_item(fetch: Fetch, size_bytes: int, *, must_tell: bool = False) -> Verdict:
    """Reads one item of `size_bytes` and holds it against what is in it.

    `must_tell`: the item is of a shard that had checksums, which are damaged.

    Raises:
        ItemDamaged: with what was expected and found; with `must_tell` also where that cannot be told.
    """
    verdict = _check_item(fetch, size_bytes)
    if must_tell and verdict is Verdict.UNCHECKED:
        raise ItemDamaged("the shard's footer of checksums is damaged, and the item has none of its own")
    return verdict


def _check_item(fetch: Fetch, size_bytes: int) -> Verdict:
    if not is_archive(fetch, size_bytes):
        return Verdict.UNCHECKED
    try:
        records = find_records(fetch, size_bytes).values()
    except ArchiveDamaged as exc:
        raise ItemDamaged(f"it {exc}") from exc
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
