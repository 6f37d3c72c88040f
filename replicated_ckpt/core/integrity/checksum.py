"""CRC32C of blocks and files, and the footer that carries the block checksums at the end of a shard.

A shard is `data | footer`. Stock DCP readers ignore bytes outside the ranges that `.metadata` names, so the footer lies
within the same file and travels with it. Layout, little endian:

    u32 crc[n]      CRC32C of each `block_bytes` piece of data (the last may be short), n = ceil(data_bytes / block_bytes)
    8s  magic       b"RCKBLK1\\n"
    u32 block_bytes
    u64 data_bytes
    u32 footer_crc  CRC32C of all footer bytes before it

Source: CRC32C (Castagnoli), RFC 3720 section 12.1, which fastcrc calls by the RFC's protocol, iSCSI.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from fastcrc.crc32 import iscsi

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"RCKBLK1\n"
BLOCK_BYTES = 256 << 10
BLOCK_BYTES_MAX = 64 << 20
FOOTER_BYTES_MAX = 256 << 20
"""Footers are read into memory before they are verified. The limit allows shards of 16 TiB."""
_TAIL = struct.Struct("<8sIQI")
FOOTER_TAIL_BYTES = _TAIL.size


def crc32c(data: Bytes, previous: int = 0) -> int:
    """CRC32C of `data`, continuing from `previous`. Releases the GIL; safe to call concurrently."""
    return int(iscsi(data, previous))


@dataclass(frozen=True)
class BlockTable:
    """Checksums of a shard's data, block by block."""

    block_bytes: int
    data_bytes: int
    crcs: tuple[int, ...]

    @property
    def footer_bytes(self) -> int:
        return 4 * len(self.crcs) + FOOTER_TAIL_BYTES

    @property
    def file_bytes(self) -> int:
        return self.data_bytes + self.footer_bytes

    def encode(self) -> bytes:
        """The footer as it lies in the file."""
        body = struct.pack(f"<{len(self.crcs)}I", *self.crcs)
        body += struct.pack("<8sIQ", MAGIC, self.block_bytes, self.data_bytes)
        return body + struct.pack("<I", crc32c(body))

    def data_crc(self) -> int:
        """CRC32C of all data, combined from the blocks'."""
        if not self.crcs:
            return 0
        *whole, last = self.crcs
        return combine_crcs(combine_equal(whole, self.block_bytes), last, self.block_size(len(whole)))

    def file_crc(self) -> int:
        """CRC32C of the whole file, footer included, as the manifest has it."""
        return crc32c(self.encode(), self.data_crc())

    def block_size(self, index: int) -> int:
        return min(self.block_bytes, self.data_bytes - index * self.block_bytes)

    def covering(self, offset: int, length: int) -> tuple[int, int]:
        """The first block of the data range [offset, offset + length), and the block after its last one."""
        return offset // self.block_bytes, -(-(offset + length) // self.block_bytes)


def size_with_footer(data_bytes: int) -> int:
    """Size of a file of `data_bytes` with its footer."""
    return data_bytes + 4 * -(-data_bytes // BLOCK_BYTES) + FOOTER_TAIL_BYTES


def usual_footer_bytes(file_bytes: int) -> int:
    """Size of the footer of a file of `file_bytes` with blocks of BLOCK_BYTES."""
    blocks = max(0, -(-(file_bytes - FOOTER_TAIL_BYTES) // (BLOCK_BYTES + 4)))
    return min(4 * blocks + FOOTER_TAIL_BYTES, file_bytes)


def tables_of_size(file_tail: Bytes, file_bytes: int) -> tuple[tuple[int, int], ...]:
    """Possible pairs of block size and data size of a file with a damaged footer, the most likely first.

    `file_tail`: the last FOOTER_TAIL_BYTES of the file, or fewer. It contains both sizes if the damage lies elsewhere.
    That pair comes last, as the file's CRC32C may not disprove it: a footer ends with its own checksum, so any other
    footer of the same length gives the same CRC32C.
    """
    data_bytes = file_bytes - usual_footer_bytes(file_bytes)
    is_possible = data_bytes >= 0 and size_with_footer(data_bytes) == file_bytes
    # The usual block size first: the tail may be the damaged part.
    found = [(BLOCK_BYTES, data_bytes)] if is_possible else []
    if footer_bytes_of(file_tail, file_bytes) is not None:
        _, said_block_bytes, said_data_bytes, _ = _TAIL.unpack(file_tail)
        if (said_block_bytes, said_data_bytes) not in found:
            found.append((said_block_bytes, said_data_bytes))
    return tuple(found)


def footer_bytes_of(file_tail: Bytes, file_bytes: int) -> int | None:
    """Size of the footer of a file of `file_bytes` whose last FOOTER_TAIL_BYTES are `file_tail`; None if it has none."""
    if len(file_tail) != FOOTER_TAIL_BYTES:
        return None
    magic, block_bytes, data_bytes, _ = _TAIL.unpack(file_tail)
    # Bounded: a damaged block size would make every later read allocate that much.
    if magic != MAGIC or not 0 < block_bytes <= BLOCK_BYTES_MAX:
        return None
    footer = 4 * -(-data_bytes // block_bytes) + FOOTER_TAIL_BYTES
    # Its sizes must add up to the file's: a stale tail in a reused file may look like a footer.
    return footer if data_bytes + footer == file_bytes and footer <= FOOTER_BYTES_MAX else None


def decode_footer(footer: Bytes, file_bytes: int) -> BlockTable | None:
    """The block table in `footer`, or None if the bytes are no intact footer of a file of `file_bytes`."""
    if len(footer) < FOOTER_TAIL_BYTES:
        return None
    tail = memoryview(footer)[-FOOTER_TAIL_BYTES:]
    if footer_bytes_of(tail, file_bytes) != len(footer):
        return None
    _, block_bytes, data_bytes, footer_crc = _TAIL.unpack(tail)
    body = memoryview(footer)[:-4]
    # Before its checksums are used: a damaged table would report intact blocks as bad.
    if crc32c(body) != footer_crc:
        return None
    return BlockTable(
        block_bytes, data_bytes, struct.unpack_from(f"<{len(footer) // 4 - FOOTER_TAIL_BYTES // 4}I", body)
    )


def first_bad_block(span: memoryview, table: BlockTable, first: int) -> str | None:
    """Describes the first block of `span` (which starts at block `first`) that fails its checksum."""
    position, index = 0, first
    while position < len(span):
        size = table.block_size(index)
        found = crc32c(span[position : position + size])
        if found != table.crcs[index]:
            begin = index * table.block_bytes
            return f"bytes {begin} to {begin + size}: expected CRC32C {table.crcs[index]:08x}, found {found:08x}"
        position += size
        index += 1
    return None


class BlockHasher:
    """Computes a shard's block table from its data, in pieces of any size. Not safe for concurrent use."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._crcs = array("I")
        self._crc = 0
        self._filled = 0
        self._data_bytes = 0

    def update(self, piece: Bytes) -> None:
        view = memoryview(piece)
        self._data_bytes += len(view)
        while view:
            part = view[: self._block_bytes - self._filled]
            self._crc = crc32c(part, self._crc)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._block_bytes:
                self._close_block()

    def _close_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc = 0
        self._filled = 0

    def table(self) -> BlockTable:
        """The table of all data so far. `update` must not be called afterwards."""
        if self._filled:
            self._close_block()
        return BlockTable(self._block_bytes, self._data_bytes, tuple(self._crcs))


# CRC32C of a whole from the CRC32Cs of its parts, without the bytes.
#
# A CRC is a polynomial over GF(2) modulo the generator. Appending a zero bit multiplies it by x. So the CRC of `A | B` is
# the CRC of A times x to the number of bits of B, plus the CRC of B. Bits are reflected, as in the CRC itself: the highest
# bit of a word is the coefficient of x^0. Source: zlib 1.3, crc32_combine_gen; the generator is Castagnoli's.

_GENERATOR = 0x82F63B78
_ONE = 1 << 31
_LENGTHS_REMEMBERED = 64


def combine_crcs(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two adjoining pieces, from the CRC32C of each."""
    lowest, low, high, highest = _shift_tables(second_bytes)
    return lowest[first & 255] ^ low[first >> 8 & 255] ^ high[first >> 16 & 255] ^ highest[first >> 24] ^ second


def combine_equal(crcs: Sequence[int], part_bytes: int) -> int:
    """CRC32C of adjoining pieces of `part_bytes` each, from the CRC32C of each.

    Each round combines all pairs of neighbours: `bytes.translate` looks up one byte of every pair in one call.
    """
    count = 1 << max(0, len(crcs) - 1).bit_length()
    # Padded to a power of two in front: leading zeros do not change a CRC of 0.
    raw = struct.pack(f"<{4 * (count - len(crcs))}x{len(crcs)}I", *crcs)
    planes = [raw[byte::4] for byte in range(4)]
    while count > 1:
        shifts, count = _shift_planes(part_bytes), count // 2
        firsts = [plane[::2] for plane in planes]
        planes = [
            _xor(plane[1::2], *(first.translate(table) for first, table in zip(firsts, tables, strict=True)))
            for plane, tables in zip(planes, shifts, strict=True)
        ]
        part_bytes *= 2
    return int.from_bytes(b"".join(planes), "little")


def _xor(*rows: bytes) -> bytes:
    total = 0
    for row in rows:
        total ^= int.from_bytes(row, "little")
    return total.to_bytes(len(rows[0]), "little")


@lru_cache(_LENGTHS_REMEMBERED)
def _shift_planes(zero_bytes: int) -> tuple[tuple[bytes, ...], ...]:
    """The tables of `_shift_tables`, split by byte of the result, the lowest first, for `bytes.translate`."""
    raws = [struct.pack(f"<{len(table)}I", *table) for table in _shift_tables(zero_bytes)]
    return tuple(tuple(raw[byte::4] for raw in raws) for byte in range(4))


@lru_cache(_LENGTHS_REMEMBERED)
def _shift_tables(zero_bytes: int) -> tuple[Sequence[int], ...]:
    """For each byte of a CRC, the lowest first: by its value, its share of the CRC after `zero_bytes` zero bytes."""
    # 31 multiplications by x instead of 32 products: every process builds these tables at its first shard.
    by_bit = [_power_of_x(8 * zero_bytes)]
    while len(by_bit) < 32:
        by_bit.append(_times_x(by_bit[-1]))
    by_bit.reverse()  # the highest bit is x^0
    return tuple(_sums(by_bit[first : first + 8]) for first in range(0, 32, 8))


def _sums(by_bit: Sequence[int]) -> Sequence[int]:
    """For each number of `len(by_bit)` bits, the sum of the terms of its set bits, the lowest bit first."""
    sums = [0]
    for term in by_bit:
        sums += [so_far ^ term for so_far in sums]
    return sums


@lru_cache(_LENGTHS_REMEMBERED)
def _power_of_x(exponent: int) -> int:
    """x to this exponent. Powers with half the exponent, a quarter, ... are cached, too: doubling it costs one product."""
    if exponent == 0:
        return _ONE
    root = _power_of_x(exponent >> 1)
    square = _product(root, root)
    return _times_x(square) if exponent & 1 else square


def _times_x(a: int) -> int:
    return (a >> 1) ^ (_GENERATOR if a & 1 else 0)


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo the generator."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_GENERATOR if b & 1 else 0)
    return product
