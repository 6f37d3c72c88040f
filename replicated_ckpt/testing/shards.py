"""The contracts of a VerifiedShard, from which a load reads a shard, and of a Sink, to which a save writes one."""

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES, BlockHasher, BlockTable, Bytes, crc32c
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.bucket_client.client import UploadSource
from replicated_ckpt.stores.tee import Buffers, Sink, Tee
from replicated_ckpt.stores.verified import Expected, VerifiedShard

DATA_BYTES = 2 * BLOCK_BYTES + 12345
"""Three blocks, the last of them short."""


def make_data(size_bytes: int = DATA_BYTES, *, seed: int = 1) -> bytes:
    """Random bytes that depend only on the seed."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311 - reproducible, not secret


def table_of(pieces: Iterable[Bytes], block_bytes: int = BLOCK_BYTES) -> BlockTable:
    """The block table of data that is passed in pieces."""
    hasher = BlockHasher(block_bytes)
    for piece in pieces:
        hasher.update(piece)
    return hasher.table()


def add_footer(data: bytes) -> tuple[bytes, BlockTable]:
    """A shard file with this data, and its block table."""
    table = table_of([data])
    return data + table.encode(), table


def expect(raw: bytes) -> Expected:
    """Size and checksum of a shard file, as in a manifest."""
    return Expected(len(raw), crc32c(raw))


def open_source(folder: Path, raw: bytes, expected: Expected | None = None) -> UploadSource:
    """A shard file to upload. `expected`: size and checksum of the save; default: those of `raw`."""
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
    """Inherit, and override `shard_for`, which makes a source of a load."""

    def shard_for(self, raw: bytes, expected: Expected) -> VerifiedShard:
        """A source that is not open, with a file of these bytes. A test may call it several times."""
        raise NotImplementedError

    @pytest.mark.parametrize(("offset", "length"), RANGES)
    def test_any_range_is_read(self, offset: int, length: int) -> None:
        """A range may span several blocks."""
        data = make_data()
        raw, table = add_footer(data)
        shard = self.shard_for(raw, expect(raw)).open()
        assert shard.table == table
        assert shard.read(offset, length) == data[offset : offset + length]
        shard.close()

    @pytest.mark.parametrize(("offset", "length"), [(0, DATA_BYTES + 1), (DATA_BYTES, 1), (-1, 1), (0, -1)])
    def test_a_range_outside_the_data_is_refused(self, offset: int, length: int) -> None:
        """The footer is not part of the data."""
        raw, _ = add_footer(make_data())
        shard = self.shard_for(raw, expect(raw)).open()
        with pytest.raises(ObjectCorrupt):
            shard.read(offset, length)
        shard.close()

    def test_a_flipped_bit_costs_one_block(self) -> None:
        """The reader refuses its block, and still reads the others."""
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
        """With another source's table, or a table recomputed from the data, the reader still reads the shard."""
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
        """The reader uses a recomputed table only if it matches the saved checksum."""
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
        """The file is intact and has the same size, but another checksum than the manifest."""
        raw, _ = add_footer(make_data(seed=1))
        other, _ = add_footer(make_data(seed=2))
        with pytest.raises(ObjectCorrupt):
            self.shard_for(other, expect(raw)).open()

    def test_a_shard_without_data_is_opened(self) -> None:
        """A rank without tensors writes such a shard."""
        raw, _ = add_footer(b"")
        shard = self.shard_for(raw, expect(raw)).open()
        assert bytes(shard.read(0, 0)) == b""
        shard.close()


ReadBack = Callable[[], bytes | None]


class SinkContract:
    """Inherit, and override the fixtures `sink`, a new sink, and `stored`, which reads its destination without the sink."""

    @pytest.fixture
    def sink(self) -> Sink:
        """A new sink."""
        raise NotImplementedError

    @pytest.fixture
    def stored(self, sink: Sink) -> ReadBack:
        """A function that reads the shard at the destination, and returns None if there is no complete one."""
        raise NotImplementedError

    def test_what_was_written_is_stored(self, sink: Sink, stored: ReadBack) -> None:
        """Pieces are stored in order. The shard is complete only after `finish` has returned."""
        raw, table = add_footer(make_data())
        whole = memoryview(raw)
        sink.write(whole[:1])
        sink.write(whole[1:1000], whole[1000:300_000])
        sink.write(whole[300_000:])
        assert stored() is None
        sink.finish(table)
        assert stored() == raw

    def test_an_empty_shard_is_stored(self, sink: Sink, stored: ReadBack) -> None:
        """A rank without tensors writes only a footer."""
        raw, table = add_footer(b"")
        sink.write(memoryview(raw))
        sink.finish(table)
        assert stored() == raw

    def test_no_piece_is_kept(self, sink: Sink, stored: ReadBack) -> None:
        """The caller may overwrite the memory after `write` has returned."""
        raw, table = add_footer(make_data())
        memory = bytearray(100_000)
        for offset in range(0, len(raw), len(memory)):
            size = min(len(memory), len(raw) - offset)
            memory[:size] = raw[offset : offset + size]
            sink.write(memoryview(memory)[:size])
        memory[:] = bytes(len(memory))
        sink.finish(table)
        assert stored() == raw

    def test_what_is_discarded_does_not_count(self, sink: Sink, stored: ReadBack) -> None:
        """After `discard` there is no shard, even if all its bytes were written."""
        sink.write(memoryview(make_data()))
        sink.discard()
        assert stored() is None

    def test_a_sink_may_be_discarded_at_once(self, sink: Sink, stored: ReadBack) -> None:
        """The save may fail before its first byte."""
        sink.discard()
        assert stored() is None

    def test_a_tee_fills_it(self, sink: Sink, stored: ReadBack) -> None:
        """As in a save: small and large writes pass through buffers and the sink's own thread."""
        data = make_data(5 << 20)
        buffers = Buffers(2, 1 << 20)
        tee = Tee([sink], buffers)
        for offset in (0, 10, 5000):
            tee.write(data[offset : {0: 10, 10: 5000}.get(offset, 9000)])
        tee.refer(memoryview(data)[9000:])
        table, (outcome,) = tee.finish()
        assert outcome.error is None
        assert stored() == data + table.encode()
        assert buffers.free.qsize() == 2

    def test_its_label_names_it(self, sink: Sink) -> None:
        """Reports and warnings contain the label, which never changes."""
        label = sink.label
        assert label
        sink.discard()
        assert sink.label == label
