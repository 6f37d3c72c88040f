"""The contract of a Sink, one destination of a shard during a save: inherit, and override the fixtures."""

from collections.abc import Callable

import pytest

from replicated_ckpt.stores.tee import Buffers, Sink, Tee
from replicated_ckpt.testing.shards import add_footer, make_data

ReadBack = Callable[[], bytes | None]


class SinkContract:
    """Inherit, and override the fixtures `sink`, a new sink, and `stored`, which reads the destination without it."""

    @pytest.fixture
    def sink(self) -> Sink:
        """A sink without any written bytes."""
        raise NotImplementedError

    @pytest.fixture
    def stored(self, sink: Sink) -> ReadBack:
        """Reads the shard at the destination; None: there is no complete one."""
        raise NotImplementedError

    def test_what_was_written_is_stored(self, sink: Sink, stored: ReadBack) -> None:
        """In order, in one piece or several. The shard counts only after `finish` has returned."""
        raw, table = add_footer(make_data())
        whole = memoryview(raw)
        sink.write(whole[:1])
        sink.write(whole[1:1000], whole[1000:300_000])
        sink.write(whole[300_000:])
        assert stored() is None
        sink.finish(table)
        assert stored() == raw

    def test_an_empty_shard_is_stored(self, sink: Sink, stored: ReadBack) -> None:
        """A rank without tensors writes a footer alone."""
        raw, table = add_footer(b"")
        sink.write(memoryview(raw))
        sink.finish(table)
        assert stored() == raw

    def test_no_piece_is_kept(self, sink: Sink, stored: ReadBack) -> None:
        """The caller overwrites the memory as soon as `write` has returned."""
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
        """Whatever was written before `discard`."""
        sink.write(memoryview(make_data()))
        sink.discard()
        assert stored() is None

    def test_a_sink_may_be_discarded_at_once(self, sink: Sink, stored: ReadBack) -> None:
        """The save may fail before its first byte."""
        sink.discard()
        assert stored() is None

    def test_a_tee_fills_it(self, sink: Sink, stored: ReadBack) -> None:
        """As in a save: small and large writes through buffers, from the sink's own thread."""
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
        """Reports and warnings show it; it stays the same."""
        label = sink.label
        assert label
        sink.discard()
        assert sink.label == label
