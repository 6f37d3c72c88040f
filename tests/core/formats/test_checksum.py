"""Checksums: block checksums and footer verify the saved bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.integrity.checksum import (
    FOOTER_TAIL_BYTES,
    BlockHasher,
    combine_crcs,
    crc32c,
    decode_footer,
    footer_bytes_of,
)
from replicated_ckpt.testing.shards import table_of


def test_crc32c_is_castagnoli() -> None:
    """The check value of RFC 3720 for the nine digits."""
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(), st.binary())
def test_combining_equals_hashing_the_whole(first: bytes, second: bytes) -> None:
    """The CRC of two joined pieces follows from the CRC of each and the second one's length."""
    assert combine_crcs(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 64))
def test_pieces_of_any_size_give_the_same_table(pieces: list[bytes], block_bytes: int) -> None:
    """The table does not depend on the sizes of the hashed pieces."""
    data = b"".join(pieces)
    table = table_of(pieces, block_bytes)
    assert table == table_of([data], block_bytes)
    assert table.data_crc() == crc32c(data)
    assert table.file_crc() == crc32c(data + table.encode())
    assert table.file_bytes == len(data) + len(table.encode())


@given(st.binary(max_size=300), st.integers(1, 64))
def test_a_footer_decodes_from_its_bytes(data: bytes, block_bytes: int) -> None:
    """Decoding inverts encoding, and the tail alone gives the footer's size."""
    table = table_of([data], block_bytes)
    footer = table.encode()
    assert footer_bytes_of(footer[-FOOTER_TAIL_BYTES:], table.file_bytes) == len(footer)
    assert decode_footer(footer, table.file_bytes) == table


@pytest.mark.parametrize("position", range(44))
def test_any_flipped_bit_in_a_footer_is_noticed(position: int) -> None:
    """A footer with any flipped byte does not decode."""
    table = table_of([b"x" * 70], 16)
    footer = bytearray(table.encode())
    assert len(footer) == 44
    footer[position] ^= 1
    assert decode_footer(bytes(footer), table.file_bytes) is None


@given(st.binary(max_size=100), st.integers(0, 1 << 40))
def test_random_bytes_are_no_footer(raw: bytes, file_bytes: int) -> None:
    """Random bytes do not decode, and raise nothing."""
    assert decode_footer(raw, file_bytes) is None


def test_covering_blocks_hold_the_range() -> None:
    """The covering blocks of a range start at or before it and end at or after it."""
    table = table_of([b"x" * 100], 16)
    assert table.covering(0, 1) == (0, 1)
    assert table.covering(16, 16) == (1, 2)
    assert table.covering(15, 2) == (0, 2)
    assert table.covering(90, 10) == (5, 7)


def test_an_empty_shard_has_a_footer() -> None:
    """A shard without data has a valid footer."""
    table = BlockHasher().table()
    assert table.data_bytes == 0
    assert decode_footer(table.encode(), FOOTER_TAIL_BYTES) == table
