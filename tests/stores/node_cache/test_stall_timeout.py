"""StallTimeout: silent ranks cost a load one time-out in all."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.stores.node_cache import exchange as exchanging
from replicated_ckpt.stores.node_cache.cache import OtherRankCache, RankCache
from replicated_ckpt.stores.node_cache.exchange import StallTimeout, Wait

SLOT = 1 << 12
STALL_TIMEOUT_S, QUIET_S = 2.0, 0.3
"""Shorter than the real ones."""


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "STALL_TIMEOUT_S", STALL_TIMEOUT_S)
    monkeypatch.setattr(exchanging, "QUIET_S", QUIET_S)


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[list[tuple[RankCache, OtherRankCache]]]:
    """The caches of three live ranks that have just pulsed."""
    caches = [RankCache.create(tmp_path, 3, SLOT) for _ in range(3)]
    others = [OtherRankCache.open(tmp_path / cache.name, 3, SLOT) for cache in caches]
    yield list(zip(caches, others, strict=True))
    for cache, other in zip(caches, others, strict=True):
        other.close()
        cache.close()


def seconds_until_lost(wait: Wait, caches: dict[int, OtherRankCache], within_s: float) -> tuple[float, list[int]]:
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < within_s:
        if lost := wait.find_lost(caches):
            return waited_s, lost
        time.sleep(0.005)
    return within_s, []


def test_the_second_silence_costs_no_second_time_out(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """After the time-out is spent, another silent rank is lost at once, and a rank that falls silent later after
    `QUIET_S`.
    """
    spent = StallTimeout()
    waited_s, lost = seconds_until_lost(Wait(spent), {0: pairs[0][1]}, 5)
    assert lost == [0]
    assert waited_s == pytest.approx(STALL_TIMEOUT_S, abs=1.0)
    assert spent.is_over
    assert Wait(spent).find_lost({1: pairs[1][1]}) == [1]
    pairs[2][0].board.pulse(time.monotonic_ns())
    waited_s, lost = seconds_until_lost(Wait(spent), {2: pairs[2][1]}, 5)
    assert lost == [2]
    assert waited_s == pytest.approx(QUIET_S, abs=1.0)


def test_a_rank_that_pulses_now_and_then_is_not_lost(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """A rank that pulses in between is never lost, however long the wait."""
    spent = StallTimeout()
    wait = Wait(spent)
    for _ in range(4):
        assert seconds_until_lost(wait, {0: pairs[0][1]}, STALL_TIMEOUT_S / 2)[1] == []
        pairs[0][0].board.pulse(time.monotonic_ns())
    assert not spent.is_over


def test_a_stop_of_this_process_counts_as_no_ranks_silence(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """After this process was stopped, as in a frozen node, each rank has time to pulse again."""
    spent = StallTimeout()
    wait = Wait(spent)
    time.sleep(STALL_TIMEOUT_S + QUIET_S)
    assert wait.find_lost({0: pairs[0][1]}) == []
    assert not spent.is_over
    pairs[0][0].board.pulse(time.monotonic_ns())
    assert seconds_until_lost(wait, {0: pairs[0][1]}, STALL_TIMEOUT_S / 2)[1] == []


def test_a_clock_of_another_host_is_not_waited_for(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """A pulse in the future, as from another host on a shared directory, does not count as a sign of life."""
    pairs[0][0].board.pulse(time.monotonic_ns() + 10**15)
    waited_s, lost = seconds_until_lost(Wait(StallTimeout()), {0: pairs[0][1]}, 5)
    assert lost == [0]
    assert waited_s < STALL_TIMEOUT_S


def test_a_dead_rank_spends_no_time_out(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """A rank whose lock is free is lost after `QUIET_S`, and the time-out is not spent."""
    spent = StallTimeout()
    pairs[0][0].close()
    waited_s, lost = seconds_until_lost(Wait(spent), {0: pairs[0][1]}, 5)
    assert lost == [0]
    assert waited_s == pytest.approx(QUIET_S, abs=1.0)
    assert not spent.is_over
