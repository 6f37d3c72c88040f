"""The CRC32 that `torch.save` leaves in the zip container of each item: a check of bytes that have no other checksum.

Source: torch.serialization (torch 2.7 to 2.15): the CRC32 of records is 0 where
`torch.serialization.set_crc32_options(False)` was in force.
"""

from enum import Enum

from fastcrc.crc32 import iso_hdlc

from replicated_ckpt.core.integrity.archive import ArchiveDamaged, Fetch, Record, find_records, is_archive

_PIECE_BYTES = 4 << 20


class Verdict(Enum):
    """The result of checking an item by the checksums inside it."""

    INTACT = "intact"
    """It is a complete zip container, and all its records match their CRC32."""
    UNCHECKED = "unchecked"
    """It is no zip container, or one without CRC32: it cannot be checked."""


class ItemDamaged(ValueError):
    """An item begins as a zip container and is damaged, or a record differs from its CRC32."""


def check_range(fetch: Fetch, size_bytes: int, *, must_tell: bool = False) -> Verdict:
    """Reads one item of `size_bytes` and checks it by its own CRC32s.

    `must_tell`: the item's shard had a footer, which is damaged.

    Raises:
        ItemDamaged: with the expected and found values; with `must_tell` also if the item cannot be checked.
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
