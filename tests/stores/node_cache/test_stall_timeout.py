"""StallTimeout: silence costs a rank one time-out in a load, whoever is silent, and however often."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.stores.node_cache import exchange as exchanging
from replicated_ckpt.stores.node_cache.cache import OtherRankCache, RankCache
from replicated_ckpt.stores.node_cache.exchange import StallTimeout, Wait

SLOT = 1 << 12
STALL_TIMEOUT_S, QUIET_S = 2.0, 0.3
"""Shorter than they are."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "STALL_TIMEOUT_S", STALL_TIMEOUT_S)
    monkeypatch.setattr(exchanging, "QUIET_S", QUIET_S)


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[list[tuple[RankCache, OtherRankCache]]]:
    """Three ranks that live, and were heard just now."""
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
    """One that is silent since the first was is aborted at once, one that falls silent later as soon as it is noticed."""
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


def test_a_rank_that_gives_signs_now_and_then_is_not_given_up(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """However long the wait is, and although each silence is noticed."""
    spent = StallTimeout()
    wait = Wait(spent)
    for _ in range(4):
        assert seconds_until_lost(wait, {0: pairs[0][1]}, STALL_TIMEOUT_S / 2)[1] == []
        pairs[0][0].board.pulse(time.monotonic_ns())
    assert not spent.is_over


def test_what_this_process_was_stopped_for_is_nobodys_silence(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """A whole node that was frozen goes on; each rank has some time to show that it lives."""
    spent = StallTimeout()
    wait = Wait(spent)
    time.sleep(STALL_TIMEOUT_S + QUIET_S)
    assert wait.find_lost({0: pairs[0][1]}) == []
    assert not spent.is_over
    pairs[0][0].board.pulse(time.monotonic_ns())
    assert seconds_until_lost(wait, {0: pairs[0][1]}, STALL_TIMEOUT_S / 2)[1] == []


def test_a_clock_of_another_host_is_not_waited_for(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """Where one directory is mounted by two hosts, a pulse of the future is no sign of life."""
    pairs[0][0].board.pulse(time.monotonic_ns() + 10**15)
    waited_s, lost = seconds_until_lost(Wait(StallTimeout()), {0: pairs[0][1]}, 5)
    assert lost == [0]
    assert waited_s < STALL_TIMEOUT_S


def test_death_costs_no_patience(pairs: list[tuple[RankCache, OtherRankCache]]) -> None:
    """A rank whose lock is free is aborted as soon as its silence is noticed, and the patience is kept for others."""
    spent = StallTimeout()
    pairs[0][0].close()
    waited_s, lost = seconds_until_lost(Wait(spent), {0: pairs[0][1]}, 5)
    assert lost == [0]
    assert waited_s == pytest.approx(QUIET_S, abs=1.0)
    assert not spent.is_over
