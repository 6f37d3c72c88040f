"""FetchAhead returns windows in order, in bounded memory, and raises an error of a thread in the rank."""

import threading
import time
from collections.abc import Callable
from typing import Self

import pytest

from replicated_ckpt.core.reading.windows import CELL_BYTES, Window
from replicated_ckpt.dcp.load import loading
from replicated_ckpt.dcp.load.loading import BUFFERS, THREADS, FetchAhead
from replicated_ckpt.errors import ShardLost
from tests.stopwatch import Stopwatch

WINDOWS = [Window("shard", index * CELL_BYTES, 8) for index in range(3 * BUFFERS)]


class Bytes:
    """A reader whose windows contain their number. `on_read` is called before each read."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        self._on_read = on_read

    def sibling(self) -> Self:
        return self

    def read_range(self, shard: str, offset: int, length: int, memory: memoryview) -> memoryview:
        number = offset // CELL_BYTES
        self._on_read(number)
        memory[:length] = bytes([number] * length)
        return memory[:length]

    def close(self) -> None:
        """Nothing is open."""


def ahead_of(on_read: Callable[[int], None]) -> FetchAhead:
    return FetchAhead(Bytes(on_read), WINDOWS, {}, None)  # type: ignore[arg-type]


def take_all(ahead: FetchAhead) -> None:
    for window in WINDOWS:
        ahead.take_window(window)
        ahead.release(window)


def test_windows_come_in_order_and_not_too_early() -> None:
    """Windows arrive in order. The threads fetch ahead no more windows than there are buffers."""
    read: list[int] = []
    ahead = ahead_of(read.append)
    for number, window in enumerate(WINDOWS):
        assert ahead.take_window(window) == bytes([number] * 8)
        time.sleep(0.01)
        assert max(read) < number + BUFFERS
        ahead.release(window)
    ahead.stop()
    assert sorted(read) == list(range(len(WINDOWS)))


@pytest.mark.parametrize("error", [ShardLost("c", {"shard": "node"}, ()), OSError(24, "Too many open files")])
def test_an_error_of_a_window_is_raised(error: Exception) -> None:
    """An error while a window is read is raised in the rank, with its class."""

    def on_read(number: int) -> None:
        if number == 4:
            raise error

    ahead = ahead_of(on_read)
    with pytest.raises(type(error)):
        take_all(ahead)
    ahead.stop()


def test_a_rank_does_not_wait_for_threads_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for buffers the rank gets MemoryError, and does not wait for a window forever."""
    monkeypatch.setattr(loading, "CELL_BYTES", 1 << 62)
    ahead = ahead_of(lambda _: None)
    with pytest.raises(MemoryError):
        ahead.take_window(WINDOWS[0])
    ahead.stop()


def test_stop_waits_a_second_for_hanging_threads(stopwatch: Stopwatch) -> None:
    """`stop` waits for hanging threads for a second in all, as the rank must report its error to the others."""
    hanging = threading.Event()

    def on_read(_: int) -> None:
        hanging.wait(20)

    ahead = ahead_of(on_read)
    time.sleep(0.1)
    started = stopwatch.now()
    ahead.stop()
    assert stopwatch.now() - started < THREADS
    hanging.set()
