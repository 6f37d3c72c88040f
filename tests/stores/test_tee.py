"""The tee: every sink gets the same bytes in order, a failing sink affects no other, and memory is bounded."""

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.errors import StoreFull, StoreUnavailable
from replicated_ckpt.stores import tee
from replicated_ckpt.stores.tee import Buffers, Tee
from replicated_ckpt.testing.shards import table_of


class Collecting:
    """A sink in memory that can fail or pause."""

    def __init__(self, label: str = "sink", *, fails_at: int | None = None, pause_s: float = 0.0) -> None:
        self.label = label
        self.data = bytearray()
        self.table: BlockTable | None = None
        self.discarded = False
        self._fails_at = fails_at
        self._pause_s = pause_s

    def write(self, *pieces: memoryview) -> None:
        time.sleep(self._pause_s)
        if self._fails_at is not None and len(self.data) >= self._fails_at:
            raise StoreUnavailable(self.label, "write", "x")
        for piece in pieces:
            self.data += piece

    def finish(self, table: BlockTable) -> None:
        self.table = table

    def discard(self) -> None:
        self.discarded = True


@pytest.mark.parametrize("is_whole", [True, False])
def test_buffers_are_freed_with_the_tee(*, is_whole: bool) -> None:
    """After finish or discard the buffers are freed by reference counts, without the garbage collector."""
    buffers = Buffers(2, 4096)
    written, found = Tee([Collecting(), Collecting()], buffers), weakref.ref(buffers)
    written.write(b"x" * 10_000)
    gc.disable()
    try:
        if is_whole:
            written.finish()
        else:
            written.discard()
        del written, buffers
        assert found() is None
    finally:
        gc.enable()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=30))
def test_all_sinks_get_data_and_footer(pieces: list[bytes]) -> None:
    """For writes of any sizes, each sink gets the data and a matching footer."""
    sinks = [Collecting(), Collecting()]
    buffers = Buffers(2, 4096)
    written = Tee(sinks, buffers)
    for piece in pieces:
        assert written.write(piece) == len(piece)
    data = b"".join(pieces)
    assert written.position == len(data)
    table, outcomes = written.finish()
    assert table == table_of([data])
    assert all(outcome.error is None for outcome in outcomes)
    assert all(bytes(sink.data) == data + table.encode() for sink in sinks)
    assert buffers.free.qsize() == 2, "every buffer came back"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=9000)), max_size=20), st.booleans())
def test_copied_and_referred_writes_give_the_same_shard(pieces: list[tuple[bool, bytes]], copies: bool) -> None:
    """Copied and referred writes in any mixture keep their order, with and without `copies`."""
    sink, buffers = Collecting(), Buffers(2, 4096)
    with mock.patch.object(tee, "REFERRED_BYTES_MIN", 1000):
        written = Tee([sink], buffers, copies=copies)
        for is_referred, piece in pieces:
            (written.refer if is_referred else written.write)(memoryview(piece))
        data = b"".join(piece for _, piece in pieces)
        assert written.position == len(data)
        table, _ = written.finish()
    assert table == table_of([data])
    assert bytes(sink.data) == data + table.encode()
    assert buffers.free.qsize() == 2, "every buffer came back"


@pytest.mark.parametrize("copies", [False, True])
def test_direct_io_gets_buffers_and_other_sinks_the_memory_itself(*, copies: bool) -> None:
    """A large piece is not copied unless `copies` is set. Then every piece but the last is one whole buffer."""
    data = memoryview(bytearray(3 * 4096 + 5))
    seen: list[tuple[memoryview, ...]] = []

    class Noting(Collecting):
        def write(self, *pieces: memoryview) -> None:
            seen.append(pieces)

    with mock.patch.object(tee, "REFERRED_BYTES_MIN", 1000):
        written = Tee([Noting()], Buffers(4, 4096), copies=copies)
        written.write(b"head")
        written.refer(data)
        written.finish()
    is_own = [piece.obj is data.obj for pieces in seen for piece in pieces]
    assert is_own == ([False] * 4 if copies else [False, True, True, True, True, False])
    if copies:
        assert [tuple(map(len, pieces)) for pieces in seen[:3]] == [(4096,)] * 3


def test_a_failing_peer_does_not_stop_the_own_store() -> None:
    """The first sink finishes although the second failed, and the outcome has the error."""
    own, peer = Collecting("own"), Collecting("peer", fails_at=8192)
    written = Tee([own, peer], Buffers(2, 4096))
    written.write(b"x" * 50_000)
    table, (first, second) = written.finish()
    assert first.error is None
    assert isinstance(second.error, StoreUnavailable)
    assert peer.discarded
    assert own.table == table
    assert bytes(own.data[:50_000]) == b"x" * 50_000


def test_a_failing_own_store_ends_the_save_early() -> None:
    """After the own store fails, a write raises that error."""

    class Full(Collecting):
        def write(self, *pieces: memoryview) -> None:
            raise StoreFull("own", "write", "x")

    written = Tee([Full("own"), Collecting("peer")], Buffers(2, 4096))
    with pytest.raises(StoreFull):
        written.write(b"x" * 4096 * 1000)
    written.discard()


def test_memory_is_bounded_by_the_buffers() -> None:
    """A slow sink blocks the writer once the buffers are full."""
    slow = Collecting("slow", pause_s=0.005)
    buffers = Buffers(2, 4096)
    written = Tee([slow], buffers)
    for _ in range(40):
        written.write(b"x" * 4096)
        assert written.position - len(slow.data) <= 3 * 4096
    written.finish()
    assert buffers.free.qsize() == 2


def test_no_thread_is_left_behind() -> None:
    """After finish or discard the sinks' threads have ended."""
    before = threading.active_count()
    for ends in ("finish", "discard"):
        written = Tee([Collecting(), Collecting()], Buffers(2, 4096))
        written.write(b"x" * 10_000)
        getattr(written, ends)()
    assert threading.active_count() == before


def test_a_sink_without_a_thread_discards_all_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a sink's thread cannot start, the tee raises, discards every sink, and ends the threads already started."""
    given_out = iter([True, False])

    def start(thread: threading.Thread) -> None:
        if not next(given_out):
            raise RuntimeError("can't start new thread")
        start_really(thread)

    start_really, before = threading.Thread.start, threading.active_count()
    monkeypatch.setattr(tee._SinkThread, "start", start)
    sinks = [Collecting("own"), Collecting("peer"), Collecting("other")]
    with pytest.raises(StoreUnavailable, match="cannot start a thread"):
        Tee(sinks, Buffers(2, 4096))
    assert [sink.discarded for sink in sinks] == [True] * 3
    assert threading.active_count() == before
