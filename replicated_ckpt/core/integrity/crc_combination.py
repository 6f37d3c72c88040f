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
_ONE, _X = 1 << 31, 1 << 30
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
    tables = _shift_tables(zero_bytes)
    return tuple(tuple(bytes(value >> bit & 255 for value in table) for table in tables) for bit in range(0, 32, 8))


@lru_cache(_LENGTHS_REMEMBERED)
def _shift_tables(zero_bytes: int) -> tuple[Sequence[int], ...]:
    """For each byte of a CRC, the lowest first: its contribution after `zero_bytes` zero bytes, by its value."""
    power = _power_of_x(8 * zero_bytes)
    return tuple(_sums([_product(power, 1 << bit) for bit in range(first, first + 8)]) for first in range(0, 32, 8))


def _sums(by_bit: Sequence[int]) -> Sequence[int]:
    """For each number of `len(by_bit)` bits, the sum of the terms of its set bits."""
    sums = [0]
    for term in by_bit:
        sums += [so_far ^ term for so_far in sums]
    return sums


def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo the generator."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_GENERATOR if b & 1 else 0)
    return product
