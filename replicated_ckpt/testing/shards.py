"""The contract of a VerifiedShard, one shard at one source of a load: inherit, and override `shard_for`."""

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES, BlockHasher, BlockTable, Bytes, crc32c
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.bucket_client.client import UploadSource
from replicated_ckpt.stores.verified import Expected, VerifiedShard

DATA_BYTES = 2 * BLOCK_BYTES + 12345
"""Three blocks, the last of them short."""


def make_data(size_bytes: int = DATA_BYTES, *, seed: int = 1) -> bytes:
    """The same bytes for the same seed."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311 - reproducible, not secret


def table_of(pieces: Iterable[Bytes], block_bytes: int = BLOCK_BYTES) -> BlockTable:
    """Block table of data given as pieces in order."""
    hasher = BlockHasher(block_bytes)
    for piece in pieces:
        hasher.update(piece)
    return hasher.table()


def add_footer(data: bytes) -> tuple[bytes, BlockTable]:
    """A shard file of this data, and its block table."""
    table = table_of([data])
    return data + table.encode(), table


def expect(raw: bytes) -> Expected:
    """Size and checksum of a shard file, as in a manifest."""
    return Expected(len(raw), crc32c(raw))


def open_source(folder: Path, raw: bytes, expected: Expected | None = None) -> UploadSource:
    """A shard file to upload. `expected` is the saved shard, if the file has changed since."""
    path = folder / "__0_0.distcp"
    path.write_bytes(raw)
    return UploadSource(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "node", path.name, expected or expect(raw))


def flip_bit(raw: bytes, position: int) -> bytes:
    """The bytes with one bit flipped; a negative position counts from the end."""
    changed = bytearray(raw)
    changed[position] ^= 1
    return bytes(changed)


RANGES = ((0, DATA_BYTES), (0, 1), (BLOCK_BYTES - 1, 2), (BLOCK_BYTES, BLOCK_BYTES), (DATA_BYTES - 1, 1), (7, 0))


class ShardContract:
    """Inherit, and override `shard_for`."""

    def shard_for(self, raw: bytes, expected: Expected) -> VerifiedShard:
        """An unopened source with a file of these bytes. Called several times in one test."""
        raise NotImplementedError

    @pytest.mark.parametrize(("offset", "length"), RANGES)
    def test_any_range_is_read(self, offset: int, length: int) -> None:
        """Also across blocks."""
        data = make_data()
        raw, table = add_footer(data)
        shard = self.shard_for(raw, expect(raw)).open()
        assert shard.table == table
        assert shard.read(offset, length) == data[offset : offset + length]
        shard.close()

    @pytest.mark.parametrize(("offset", "length"), [(0, DATA_BYTES + 1), (DATA_BYTES, 1), (-1, 1), (0, -1)])
    def test_a_range_outside_the_data_is_refused(self, offset: int, length: int) -> None:
        """The footer is not part of the data, and no bytes are invented."""
        raw, _ = add_footer(make_data())
        shard = self.shard_for(raw, expect(raw)).open()
        with pytest.raises(ObjectCorrupt):
            shard.read(offset, length)
        shard.close()

    def test_a_flipped_bit_costs_one_block(self) -> None:
        """Its block is refused; the other blocks are still read."""
        data = make_data()
        raw, _ = add_footer(data)
        shard = self.shard_for(flip_bit(raw, BLOCK_BYTES + 5), expect(raw)).open()
        with pytest.raises(ObjectCorrupt):
            shard.read(BLOCK_BYTES, 1)
        with pytest.raises(ObjectCorrupt):
            shard.read(0, DATA_BYTES)
        assert shard.read(0, BLOCK_BYTES) == data[:BLOCK_BYTES]
        assert shard.read(2 * BLOCK_BYTES, 100) == data[2 * BLOCK_BYTES :][:100]
        shard.close()

    @pytest.mark.parametrize("position", [-1, -10, -20, -30])
    def test_a_damaged_footer_is_refused_and_can_be_done_without(self, position: int) -> None:
        """With the table of another source, or one recomputed from the data, the shard is still read."""
        data = make_data()
        raw, table = add_footer(data)
        bad, wanted = flip_bit(raw, position), expect(raw)
        with pytest.raises(ObjectCorrupt):
            self.shard_for(bad, wanted).open()
        lent = Expected(wanted.size_bytes, wanted.crc32c, table=table)
        rebuilt = Expected(wanted.size_bytes, wanted.crc32c, has_damaged_footer=True)
        for expected in (lent, rebuilt):
            shard = self.shard_for(bad, expected).open()
            assert shard.read(0, DATA_BYTES) == data
            shard.close()

    def test_damage_in_footer_and_data_is_not_rebuilt(self) -> None:
        """A recomputed table is used only if it matches the saved checksum."""
        raw, _ = add_footer(make_data())
        wanted = expect(raw)
        footer_damaged = Expected(wanted.size_bytes, wanted.crc32c, has_damaged_footer=True)
        with pytest.raises(ObjectCorrupt):
            self.shard_for(flip_bit(flip_bit(raw, 5), -1), footer_damaged).open()

    @pytest.mark.parametrize("missing_bytes", [1, BLOCK_BYTES, DATA_BYTES])
    def test_a_file_that_was_cut_short_is_refused(self, missing_bytes: int) -> None:
        """A full disk or a power loss leaves such a file."""
        raw, _ = add_footer(make_data())
        with pytest.raises(ObjectCorrupt):
            self.shard_for(raw[:-missing_bytes], expect(raw)).open()

    def test_another_saves_file_is_refused(self) -> None:
        """It is intact and of the same size, but its checksum differs from the manifest."""
        raw, _ = add_footer(make_data(seed=1))
        other, _ = add_footer(make_data(seed=2))
        with pytest.raises(ObjectCorrupt):
            self.shard_for(other, expect(raw)).open()

    def test_a_shard_without_data_is_opened(self) -> None:
        """A rank without tensors has one."""
        raw, _ = add_footer(b"")
        shard = self.shard_for(raw, expect(raw)).open()
        assert bytes(shard.read(0, 0)) == b""
        shard.close()
