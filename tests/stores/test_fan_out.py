"""FanOut: the number of concurrent calls, and whether an error ends the run."""

import threading

import pytest

from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.threads import FanOut

pytestmark = pytest.mark.timeout(60)
WITHIN_S = 30.0


def test_the_number_of_concurrent_calls_is_bounded() -> None:
    """Of six calls exactly `most=2` run at once."""
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
def test_an_error_ends_the_run_if_asked(error: Exception, until_error: bool) -> None:
    """With `until_error` the run ends after an error. Otherwise every key gets its call."""
    called = []

    def call(key: int) -> None:
        called.append(key)
        if key == 1:
            raise error

    with pytest.raises(type(error)):
        FanOut.run(range(4), call, most=1, until_error=until_error).raise_first()
    assert called == ([0, 1] if until_error else [0, 1, 2, 3])
