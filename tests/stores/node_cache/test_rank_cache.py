"""The rank cache: other processes read complete pieces in order, and only the owner's end removes the file's name."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.stores.node_cache.cache import _ENTRIES, SLOTS, OtherRankCache, RankCache
from tests.harness.processes import open_below, stop_process

SLOT = 1 << 12
Process = subprocess.Popen[str]
Holder = Callable[[int], tuple[Process, str]]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RankCache]:
    made = RankCache.create(tmp_path, 2, SLOT)
    made.reserve(SLOTS)
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path, own: RankCache) -> Iterator[OtherRankCache]:
    made = OtherRankCache.open(tmp_path / own.name, 2, SLOT)
    yield made
    made.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """Starts processes that hold a cache with some pieces, and returns its name. Each ends with the test."""
    with ExitStack() as stack:

        def start(pieces: int) -> tuple[Process, str]:
            process = started("hold", tmp_path, pieces)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        yield start


def started(what: str, directory: Path, argument: float) -> Process:
    command = [sys.executable, "-m", "tests.stores.node_cache.cache_process", what, str(directory), str(argument)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def copied(cache: OtherRankCache, number: int) -> bytes | None:
    found = cache.copy(number, memoryview(bytearray(SLOT)))
    return None if found is None else bytes(found)


def test_pieces_are_taken_as_they_were_put(own: RankCache, other: OtherRankCache) -> None:
    """A piece may already be in its slot, or elsewhere. A reused slot has only the later piece."""
    assert copied(other, 0) is None
    inside = own.slot(0)[100:105]
    inside[:] = b"slot0"
    assert bytes(own.put_piece(0, inside)) == b"slot0"
    assert bytes(own.put_piece(1, memoryview(bytearray(b"elsewhere")))) == b"elsewhere"
    assert copied(other, 0) == b"slot0"
    assert copied(other, 1) == b"elsewhere"
    assert other.board.entry(SLOTS)[0] == 0
    assert copied(other, SLOTS) is None
    own.put_piece(SLOTS, memoryview(bytearray(b"again")))
    assert copied(other, SLOTS) == b"again"
    assert copied(other, 0) is None


def test_a_piece_that_changed_is_not_taken(own: RankCache, other: OtherRankCache) -> None:
    """A piece with a wrong checksum or an invalid entry is not taken."""
    own.put_piece(0, memoryview(bytearray(b"intact")))
    own.slot(0)[2] ^= 1
    assert copied(other, 0) is None
    own.put_piece(1, None)
    assert copied(other, 1) is None
    for begin, size in [(SLOT - 2, 6), (1 << 40, 6), (0, 1 << 40)]:
        own.board.set_entry(2, begin, size, 0)
        assert copied(other, 2) is None


class BoardFailingAtTheNumber:
    """A board that fails right before it writes the number of the piece in slot 0."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def __setitem__(self, index: int, value: int) -> None:
        if index == _ENTRIES:
            raise InterruptedError
        self._words[index] = value


def test_a_half_written_entry_gives_no_piece_of_another_number(own: RankCache, other: OtherRankCache) -> None:
    """A taker that is still at an old piece while its slot is reused does not take the later piece for the old one."""
    own.put_piece(0, memoryview(bytearray(b"first")))
    own.board._words = BoardFailingAtTheNumber(own.board._words)  # type: ignore[assignment]
    with pytest.raises(InterruptedError):
        own.put_piece(SLOTS, memoryview(bytearray(b"later")))
    assert other.board.entry(0)[0] == 0
    assert copied(other, 0) is None


def test_other_processes_see_the_board(own: RankCache, other: OtherRankCache) -> None:
    """Other processes see a rank's progress, that it left, and up to eight silent nodes."""
    assert (other.board.count_passed(1), other.board.has_left) == (-1, False)
    own.board.pass_pieces(1, 7)
    own.board.leave()
    assert (other.board.count_passed(1), other.board.has_left) == (7, True)
    assert not other.board.is_marked_silent("node-0")
    for index in range(9):
        own.board.mark_silent("node-0")
        own.board.mark_silent(f"node-{index}")
    assert [other.board.is_marked_silent(f"node-{index}") for index in range(10)] == [True] * 8 + [False] * 2
    at = other.board.pulse_ns
    own.board.pulse(at - 1)
    assert other.board.pulse_ns == at


def test_an_opened_cache_stays_readable_after_its_owner_closed_it(tmp_path: Path) -> None:
    """The owner's close removes the name. A process that has opened the cache can still take its pieces."""
    own = RankCache.create(tmp_path, 2, SLOT)
    own.reserve(1)
    own.put_piece(0, memoryview(bytearray(b"piece")))
    other = OtherRankCache.open(tmp_path / own.name, 2, SLOT)
    assert other.is_locked()
    own.close()
    own.close()
    assert list(tmp_path.iterdir()) == []
    assert (other.board.has_left, other.is_locked()) == (True, False)
    assert copied(other, 0) == b"piece"
    other.close()
    assert not other.is_locked()
    with pytest.raises(OSError, match="No such file"):
        OtherRankCache.open(tmp_path / own.name, 2, SLOT)


def test_a_collected_cache_removes_its_file(tmp_path: Path) -> None:
    """A cache that is garbage-collected, as after a failed load, leaves neither a file nor a descriptor."""
    for _ in range(3):
        RankCache.create(tmp_path, 2, SLOT)
    assert list(tmp_path.iterdir()) == []
    assert open_below(tmp_path) == []


def test_a_forked_process_does_not_remove_the_file(tmp_path: Path) -> None:
    """A worker that was forked during a load ends: the cache keeps its name."""
    own = RankCache.create(tmp_path, 2, SLOT)
    child = os.fork()
    if child == 0:
        own._close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / own.name).exists()
    own.close()


def test_new_caches_keep_their_names_while_others_sweep(tmp_path: Path) -> None:
    """Four processes make caches, each sweeping first: no new cache loses its name."""
    processes = [started("keep-making", tmp_path, 1.5) for _ in range(4)]
    counts = [tuple(map(int, process.communicate(timeout=60)[0].split())) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert all(made > 20 and lost == 0 for made, lost in counts), counts
    assert list(tmp_path.iterdir()) == []


def test_dead_and_stopped_processes_are_distinguished(tmp_path: Path, holder: Holder) -> None:
    """A stopped process holds its lock, and a killed one does not. Its pieces can still be taken."""
    process, name = holder(2)
    cache = OtherRankCache.open(tmp_path / name, 2, SLOT)
    stop_process(process.pid)
    assert cache.is_locked()
    process.kill()
    process.wait()
    assert not cache.is_locked()
    assert copied(cache, 1) == bytes([2] * 8)
    cache.close()


def test_caches_of_ended_processes_are_removed(tmp_path: Path, holder: Holder) -> None:
    """A new cache removes those of ended processes in its directory, and no other."""
    killed, _ = holder(0)
    _, living = holder(0)
    killed.kill()
    killed.wait()
    (tmp_path / "cache-left-behind").write_bytes(b"")
    last = RankCache.create(tmp_path, 1, SLOT)
    assert {path.name for path in tmp_path.iterdir()} == {living, last.name}
    last.close()
