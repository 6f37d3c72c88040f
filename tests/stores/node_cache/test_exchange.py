"""The exchange: ranks of a node that fetch for each other never deadlock, and a failed rank stops no other."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.core.reading.windows import CELL_BYTES, Unit, Window
from replicated_ckpt.stores.node_cache import cache as caches
from replicated_ckpt.stores.node_cache import exchange as exchanges
from replicated_ckpt.stores.node_cache import exchange as exchanging
from replicated_ckpt.stores.node_cache.cache import SLOTS, OtherRankCache, RankCache
from replicated_ckpt.stores.node_cache.exchange import Exchange, Found
from tests.harness.processes import stop_process
from tests.stopwatch import Stopwatch
from tests.stores.node_cache.exchange_worlds import Outcome, World, opened, search, worlds

SLOT = 1 << 12
ALIVE = 1.0
"""Seconds that a call without a wait may take."""
STALL_TIMEOUT_S, QUIET_S = 2.0, 0.5
"""Shorter than the real ones."""


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "STALL_TIMEOUT_S", STALL_TIMEOUT_S)
    monkeypatch.setattr(exchanging, "QUIET_S", QUIET_S)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot and small cells: more states of the protocol in fewer steps."""
    monkeypatch.setattr(caches, "SLOTS", 1)
    monkeypatch.setattr(exchanges, "SLOTS", 1)
    monkeypatch.setattr(exchanges, "CELL_BYTES", 8)
    monkeypatch.setattr(logging.getLogger(exchanges.__name__), "disabled", True)


def searched(
    directory: Path, ranks: int, cells: int, threads: int, faults: tuple[int, int, int], every: int
) -> Outcome:
    """Searches every `every`-th world of this size. `faults`: deaths, stops, failures."""
    whole = Outcome()
    for number, world in enumerate(worlds(ranks, cells)):
        if number % every == 0:
            with opened(directory, ranks, world, threads) as at:
                found = search(at, at.first(*faults))
            whole.states += found.states
            whole.fetched_alone += found.fetched_alone
            whole.ends |= found.ends
    return whole


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("ranks", "cells", "threads"), [(2, 3, 1), (2, 2, 2), (3, 2, 1)])
def test_undisturbed_ranks_never_deadlock(tmp_path: Path, ranks: int, cells: int, threads: int) -> None:
    """For all needs and all orders of steps, every rank finishes, and each piece is fetched once."""
    whole = searched(tmp_path, ranks, cells, threads, (0, 0, 0), 1 if ranks == 2 else 5)
    assert whole.fetched_alone == 0
    assert whole.ends == {("done",) * ranks}
    assert whole.states > 1000


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("faults", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_ranks_that_fail_hold_no_other_up(tmp_path: Path, faults: tuple[int, int, int]) -> None:
    """A rank dies, pauses, fails or never joins, at every point: the others finish with the right bytes."""
    whole = searched(tmp_path, 2, 2, 1, faults, 1)
    assert ("done", "done") in whole.ends
    assert len(whole.ends) > 1
    assert whole.fetched_alone > 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "broken", ["order of fetching", "order of taking", "takers do not pass pieces", "ranks do not leave"]
)
def test_the_search_finds_deadlocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """With an invariant broken on purpose, the search finds a deadlock."""
    made = World.__init__

    def disordered(self: World, *args: Any) -> None:
        made(self, *args)
        of_rank = self.tasks_of if broken == "order of fetching" else self.cells_of
        of_rank[1].reverse()

    if broken.startswith("order"):
        monkeypatch.setattr(World, "__init__", disordered)
    elif broken == "takers do not pass pieces":
        monkeypatch.setattr(Exchange, "take_piece", lambda self, unit: None)
    else:
        monkeypatch.setattr(Exchange, "leave", lambda self: None)
    with pytest.raises(AssertionError, match="cannot go on"):
        searched(tmp_path, 2, 3, 1, (0, 0, 1), 1)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("ranks", "cells", "threads", "faults", "every"),
    [
        (2, 4, 2, (0, 0, 0), 1),
        (3, 2, 1, (0, 0, 0), 1),
        (3, 3, 1, (0, 0, 0), 8),
        (2, 3, 1, (1, 0, 0), 1),
        (2, 3, 1, (0, 1, 1), 1),
        (3, 2, 1, (1, 0, 1), 1),
    ],
)
def test_larger_worlds_have_no_deadlock_either(
    tmp_path: Path, ranks: int, cells: int, threads: int, faults: tuple[int, int, int], every: int
) -> None:
    """Searches with more cells, threads and ranks than the fast ones."""
    whole = searched(tmp_path, ranks, cells, threads, faults, every)
    print(ranks, cells, threads, faults, whole.states)  # noqa: T201
    assert (whole.fetched_alone == 0) == (faults == (0, 0, 0))
    assert ("done",) * ranks in whole.ends


# Two ranks: rank 0 is this process; rank 1 is another process or this one ------------------------------------------------


def units(fetchers: Sequence[int]) -> list[Unit]:
    return [Unit(Window("shard", index * CELL_BYTES, 8), fetcher, (0, 1)) for index, fetcher in enumerate(fetchers)]


class Pair:
    """Two ranks of one node, both in this process."""

    def __init__(self, directory: Path, fetchers: Sequence[int], slot_bytes: int = SLOT) -> None:
        self.units = units(fetchers)
        self.caches = [RankCache.create(directory, 2, slot_bytes) for _ in range(2)]
        self.exchanges = []
        for rank in range(2):
            other = OtherRankCache.open(directory / self.caches[1 - rank].name, 2, slot_bytes)
            self.exchanges.append(Exchange(rank, self.caches[rank], {1 - rank: other}, self.units))

    def close(self) -> None:
        for exchange, cache in zip(self.exchanges, self.caches, strict=True):
            exchange.close()
            cache.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two ranks that fetch `SLOTS + 1` pieces each, alternately, and have begun."""
    made = Pair(tmp_path, [0, 1] * (SLOTS + 1))
    for exchange in made.exchanges:
        exchange.begin_load()
    yield made
    made.close()


def piece(number: int) -> memoryview:
    return memoryview(bytearray([number + 1] * 8))


def test_a_piece_is_waited_for_and_then_taken(pair: Pair) -> None:
    """A taker waits until the piece is there, and gets its own copy: a change of the slot does not affect it."""
    first, second = pair.exchanges
    threading.Timer(0.1, lambda: first.put_piece(0, piece(0))).start()
    found = second.take_piece(pair.units[0])
    assert found is not None
    first.slot(0)[:] = bytes(SLOT)
    assert found == piece(0)
    assert first.slot_awaits(SLOTS) == [0]
    first.release(pair.units[0])
    assert first.slot_awaits(SLOTS) == []


def test_a_rank_that_leaves_is_waited_for_no_more(pair: Pair, stopwatch: Stopwatch) -> None:
    """After a rank leaves, the other takes its finished pieces, fetches the rest itself, and does not wait for it to
    free slots.
    """
    first, second = pair.exchanges
    first.put_piece(0, piece(0))
    first.release(pair.units[0])
    first.leave()
    assert second.take_piece(pair.units[0]) == piece(0)
    started = stopwatch.now()
    assert second.take_piece(pair.units[2]) is None
    for number in range(SLOTS):
        second.put_piece(number, piece(number))
        second.release(pair.units[2 * number + 1])
    assert second.wait_for_slot(SLOTS, lambda: False)
    assert stopwatch.now() - started < ALIVE


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for the boards of two caches and one slot."""
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={3 * SLOT}", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.fault
def test_a_rank_on_a_full_disk_shares_nothing(full_disk: Path, stopwatch: Stopwatch) -> None:
    """On a full disk a rank shares no pieces, and no rank waits for them. It takes those of the others."""
    made = Pair(full_disk, [0, 1])
    started = stopwatch.now()
    first, second = made.exchanges
    second.begin_load()
    first.begin_load()
    assert first.unit_of(made.units[0].window.cell) is None
    assert second.take_piece(made.units[0]) is None
    second.put_piece(0, piece(0))
    assert first.unit_of(made.units[1].window.cell) is made.units[1]
    assert first.take_piece(made.units[1]) == piece(0)
    assert stopwatch.now() - started < ALIVE
    made.close()


def test_a_rank_whose_cache_cannot_be_opened_is_not_waited_for(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """A rank that cannot open the other's cache does not wait for it. It marks all pieces as passed, so that the other
    does not wait either.
    """
    made = Pair(tmp_path, [0, 1] * (SLOTS + 1))
    blind = Exchange(0, made.caches[0], {}, made.units)
    blind.begin_load()
    made.exchanges[1].begin_load()
    started = stopwatch.now()
    assert blind.take_piece(made.units[1]) is None
    assert blind.wait_for_slot(SLOTS, lambda: blind.slot_awaits(SLOTS) == [0]) is False
    assert made.exchanges[1]._has_passed(0, SLOTS)
    made.exchanges[1].leave()
    made.exchanges[1].wait_until_opened()
    assert stopwatch.now() - started < ALIVE
    made.close()


def test_ranks_share_what_they_learn_of_silent_nodes(pair: Pair) -> None:
    """After one rank's time-out for a node, the other ranks treat that node as silent."""
    first, second = pair.exchanges
    assert not second.is_silent("node-a")
    first.mark_silent("node-a")
    assert second.is_silent("node-a")
    assert not second.is_silent("node-b")


class Remote:
    """Rank 1 in its own process with `pieces` pieces in its cache. Rank 0 is this process."""

    def __init__(self, directory: Path, pieces: int, fetchers: Sequence[int]) -> None:
        command = [sys.executable, "-m", "tests.stores.node_cache.cache_process", "hold", str(directory), str(pieces)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        name = self.process.stdout.readline().strip()
        self.units = units(fetchers)
        self.cache = RankCache.create(directory, 2, SLOT)
        self.exchange = Exchange(0, self.cache, {1: OtherRankCache.open(directory / name, 2, SLOT)}, self.units)
        self.exchange.begin_load()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.exchange.close()
        self.cache.close()


@pytest.mark.usefixtures("short_timeouts")
def test_a_rank_that_was_killed_costs_nearly_nothing(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """A killed rank's lock is free: its finished pieces are taken, and no rank waits for it as fetcher or taker."""
    remote = Remote(tmp_path, 1, [1, 1, 1, *[0] * (SLOTS + 2)])
    remote.process.kill()
    remote.process.wait()
    began, started = time.monotonic(), stopwatch.now()
    assert remote.exchange.take_piece(remote.units[0]) == piece(0)
    assert remote.exchange.take_piece(remote.units[1]) is None
    assert time.monotonic() - began > QUIET_S / 2
    assert stopwatch.now() - started < QUIET_S + ALIVE
    again = stopwatch.now()
    assert remote.exchange.take_piece(remote.units[2]) is None
    for number in range(SLOTS + 1):
        assert remote.exchange.wait_for_slot(number, lambda: False)
        remote.exchange.release(remote.units[3 + number])
    remote.exchange.leave()
    remote.exchange.wait_until_opened()
    assert stopwatch.now() - again < ALIVE
    remote.close()


@pytest.mark.usefixtures("short_timeouts")
def test_a_rank_that_hangs_costs_one_time_out_in_all(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """A stopped rank costs one `STALL_TIMEOUT_S` per load, not one for each piece or slot. It may go on afterwards."""
    remote = Remote(tmp_path, 0, [1, 1, *[0] * (SLOTS + 2)])
    stop_process(remote.process.pid)
    began, started = time.monotonic(), stopwatch.now()
    waiting = threading.Thread(target=remote.exchange.wait_for_slot, args=(SLOTS, lambda: False))
    remote.exchange.release(remote.units[2])
    waiting.start()
    assert remote.exchange.find_piece(remote.units[0]) is Found.NOT_YET
    assert remote.exchange.take_piece(remote.units[0]) is None
    waiting.join()
    assert time.monotonic() - began > STALL_TIMEOUT_S - 0.1
    assert stopwatch.now() - started < STALL_TIMEOUT_S + QUIET_S + ALIVE
    again = stopwatch.now()
    assert remote.exchange.take_piece(remote.units[1]) is None
    assert remote.exchange._timeout.is_over
    assert remote.cache.board.count_passed(1) > SLOTS
    assert stopwatch.now() - again < ALIVE
    remote.process.send_signal(signal.SIGCONT)
    remote.close()


@pytest.mark.usefixtures("short_timeouts")
def test_a_rank_that_works_slowly_is_waited_for(tmp_path: Path) -> None:
    """While a rank pulses, the others wait for its pieces."""
    remote = Remote(tmp_path, 0, [1])
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(remote.exchange.take_piece(remote.units[0]) is None))
    thread.start()
    thread.join(STALL_TIMEOUT_S + 2 * QUIET_S)
    assert done == []
    remote.process.kill()
    thread.join(2 * QUIET_S + ALIVE)
    assert done == [True]
    remote.close()


@pytest.mark.usefixtures("short_timeouts")
def test_ranks_that_wait_for_each_other_time_out(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """If ranks did deadlock, they would end it after one time-out: a waiting rank's pulse is as old as its fetcher's."""
    made = Pair(tmp_path, [0, 1])
    for exchange in made.exchanges:
        exchange.begin_load()
    began, started = time.monotonic(), stopwatch.now()
    threads = [
        threading.Thread(target=made.exchanges[rank].take_piece, args=(made.units[1 - rank],)) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * STALL_TIMEOUT_S)
    assert time.monotonic() - began > STALL_TIMEOUT_S - 0.1
    assert stopwatch.now() - started < STALL_TIMEOUT_S + QUIET_S + ALIVE
    made.close()
