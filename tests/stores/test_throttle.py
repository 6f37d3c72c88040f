"""The pace of replica copies: slow during saves and loads, unlimited otherwise."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.node_cache.cache import RankCache, is_any_cache_locked
from replicated_ckpt.stores.throttle import (
    BUSY_BYTES_PER_S,
    LOOK_EVERY_S,
    Stopped,
    YieldingPace,
    copy_pace,
    submission_pace,
)
from tests.agent.checkpoints import checkpointed, shard

SAVE = "e" * 32
MINUTE_BYTES = 60 * BUSY_BYTES_PER_S


class RecordedWaits(threading.Event):
    """An event that records each timeout, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return self.is_set()


def never() -> bool:
    return False


def always() -> bool:
    return True


@pytest.mark.parametrize(
    ("is_busy", "is_fetching", "minutes"),
    [(never, never, []), (always, never, [1]), (always, always, [16]), (never, always, [16])],
    ids=["neither", "busy", "both", "fetching"],
)
def test_a_pace_is_kept_only_while_the_node_is_busy(
    is_busy: Callable[[], bool], is_fetching: Callable[[], bool], minutes: list[int]
) -> None:
    """A copy of `MINUTE_BYTES` is not delayed on an idle node, takes a minute during a save, and longer while ranks
    fetch.
    """
    stopping = RecordedWaits()
    copy_pace(None, stopping, is_busy, is_fetching).take(MINUTE_BYTES)
    assert [round(seconds / 60) for seconds in stopping.seconds] == minutes


def test_a_pace_follows_what_the_node_does() -> None:
    """A copy is slow while a rank fetches for a load, and unlimited after that rank's cache is closed."""
    fetching = [True]
    stopping = RecordedWaits()
    pace = copy_pace(None, stopping, never, lambda: fetching[0])
    pace.take(MINUTE_BYTES)
    fetching[0] = False
    time.sleep(LOOK_EVERY_S)
    pace.take(MINUTE_BYTES)
    assert len(stopping.seconds) == 1


def test_a_rank_fetches_while_it_has_a_cache(tmp_path: Path) -> None:
    """A node counts as fetching while a live rank's cache exists. A dead rank's file does not count."""
    assert not is_any_cache_locked(tmp_path)
    cache = RankCache.create(tmp_path, 1, 4096)
    assert is_any_cache_locked(tmp_path)
    cache.close()
    assert not is_any_cache_locked(tmp_path)
    (tmp_path / "cache-of-a-dead-rank").touch()
    assert not is_any_cache_locked(tmp_path)


def test_a_pace_from_the_operator_is_always_kept() -> None:
    """A pace set by the operator also applies on an idle node."""
    stopping = RecordedWaits()
    copy_pace(256.0, stopping, never, never).take(MINUTE_BYTES)
    assert round(stopping.seconds[0] / 10) == 6


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_stopping_agent_stops_a_copy(is_busy: bool) -> None:
    """A stopping agent ends a copy at the next piece, paced or not."""
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Stopped):
        YieldingPace(stopping, lambda: 1.0 if is_busy else None).take(1)


def test_a_node_is_in_use_while_it_saves_or_is_read(tmp_path: Path) -> None:
    """A node is in use while a rank locks an open save, and while a load has a checkpoint pinned."""
    service = NodeService(LocalStore(tmp_path / "node"))
    store = service.store
    assert not service.is_in_use()
    service.open_save(Intent(SAVE, "step-2", "session", overwrite=False))
    lock = store.lock_save(SAVE)
    assert service.is_in_use()
    lock.release()
    service.abort(SAVE, "a rank failed")
    manifest = checkpointed([store], 1, {shard(0): (0,)})
    assert not service.is_in_use()
    service.pins.pin(manifest.save_id, "session/0")
    assert service.is_in_use()
    service.pins.end("session")
    assert not service.is_in_use()


def test_a_slow_pace_of_copies_aborts_no_shard() -> None:
    """If the pace of copies is so slow that a buddy would abort, submitted shards have a pace of their own. Otherwise
    they share it.
    """
    stopping = threading.Event()
    slow, fast = (copy_pace(rate, stopping, never, never) for rate in (0.001, 64))
    own = submission_pace(0.001, stopping, slow)
    assert own is not None
    assert own is not slow
    for _ in range(4):
        own.take(100_000)  # 0.05 s in all; at the pace of copies 400 s
    assert submission_pace(64, stopping, fast) is fast
    assert submission_pace(None, stopping, copy_pace(None, stopping, never, never)) is None
