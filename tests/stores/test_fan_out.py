"""The same call to many at once: how many, and whether an error of one ends it."""

import threading

import pytest

from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.threads import FanOut

pytestmark = pytest.mark.timeout(60)
WITHIN_S = 30.0


def test_so_many_calls_are_under_way_at_once_and_no_more() -> None:
    """Each of two waits for the other one; six in all."""
    meeting, lock, now, most = threading.Barrier(2), threading.Lock(), 0, 0

    def call(key: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        meeting.wait(WITHIN_S)
        with lock:
            now -= 1
        return -key

    assert FanOut.run(range(6), call, most=2).raise_first() == {key: -key for key in range(6)}
    assert most == 2


@pytest.mark.parametrize("until_error", [False, True])
@pytest.mark.parametrize("error", [StoreError("s", "op", "key", "away"), RuntimeError("a defect")])
def test_an_error_ends_it_where_that_is_asked_for(error: Exception, until_error: bool) -> None:
    """Else every key gets its call."""
    called = []

    def call(key: int) -> None:
        called.append(key)
        if key == 1:
            raise error

    with pytest.raises(type(error)):
        FanOut.run(range(4), call, most=1, until_error=until_error).raise_first()
    assert called == ([0, 1] if until_error else [0, 1, 2, 3])
