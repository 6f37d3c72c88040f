"""CRC32C of a whole from the CRC32Cs of its parts, without the bytes.

A CRC is a polynomial over GF(2) modulo the generator, and zero bytes behind it multiply it by a power of x. So the CRC of
`A | B` is that of A, multiplied by x to the number of bits of B, plus that of B. Bits are reflected, as in the CRC itself:
the highest bit of a word is the coefficient of x^0.

Source: zlib 1.3, crc32_combine_gen; the generator is Castagnoli's, RFC 3720 section 12.1.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

_GENERATOR = 0x82F63B78
_ONE = 1 << 31
_LENGTHS_REMEMBERED = 64


def combine_crcs(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two adjoining pieces, from the CRC32C of each."""
    lowest, low, high, highest = _shift_tables(second_bytes)
    return lowest[first & 255] ^ low[first >> 8 & 255] ^ high[first >> 16 & 255] ^ highest[first >> 24] ^ second


def combine_equal(crcs: Sequence[int], part_bytes: int) -> int:
    """CRC32C of adjoining pieces of `part_bytes` each, from the CRC32C of each. Pairs of neighbours are combined at once.

    `bytes.translate` looks up one byte of all pairs in one call. Padding pieces of CRC32C 0 in front change nothing.
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
    """As `_shift_tables`, by byte of the result, the lowest first, as tables for `translate`."""
    raws = [struct.pack(f"<{len(table)}I", *table) for table in _shift_tables(zero_bytes)]
    return tuple(tuple(raw[byte::4] for raw in raws) for byte in range(4))


@lru_cache(_LENGTHS_REMEMBERED)
def _shift_tables(zero_bytes: int) -> tuple[Sequence[int], ...]:
    """For each byte of a CRC, the lowest first: its contribution after `zero_bytes` zero bytes, by its value."""
    # Every process builds these at its first shard: 31 steps by x instead of 32 products.
    by_bit = [_power_of_x(8 * zero_bytes)]
    while len(by_bit) < 32:
        by_bit.append(_times_x(by_bit[-1]))
    by_bit.reverse()  # the highest bit is x^0
    return tuple(_sums(by_bit[first : first + 8]) for first in range(0, 32, 8))


def _sums(by_bit: Sequence[int]) -> Sequence[int]:
    """For each number of `len(by_bit)` bits, the sum of the terms of its set bits."""
    sums = [0]
    for term in by_bit:
        sums += [so_far ^ term for so_far in sums]
    return sums


@lru_cache(_LENGTHS_REMEMBERED)
def _power_of_x(exponent: int) -> int:
    """Remembered with its halves: each doubling of a length costs one product."""
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
