"""A retrying client repeats requests to an unavailable bucket for a bounded time, and no other failed request."""

from collections.abc import Iterator

import pytest

from replicated_ckpt.errors import ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import READ_WITHIN_S, RetryingClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget


class Failing:
    """A wrapper of an in-memory client whose first answers are errors."""

    def __init__(self, *errors: type[StoreError]) -> None:
        self.client = open_client(ObjectTarget.check_supported("memory://retried/x", None))
        self.client.put("a", b"abcd")
        self.target, self.has_conditions = self.client.target, self.client.has_conditions
        self.errors: Iterator[type[StoreError]] = iter(errors)
        self.asked = 0

    def read(self, key: str, offset: int, target: memoryview) -> None:
        self.asked += 1
        for error in self.errors:
            raise error("bucket", "read", key, "for the test")
        self.client.read(key, offset, target)


def read_by(failing: Failing, clock_step_s: float = 0.0) -> bytes:
    now = iter(count * clock_step_s for count in range(1000))
    raw = bytearray(4)
    client = RetryingClient(failing, clock=lambda: next(now), sleep=lambda _: None)  # type: ignore[arg-type]
    client.read("a", 0, memoryview(raw))
    return bytes(raw)


def test_a_throttled_read_is_asked_again() -> None:
    """A read repeats until the bucket answers."""
    failing = Failing(StoreUnavailable, StoreUnavailable)
    assert read_by(failing) == b"abcd"
    assert failing.asked == 3


@pytest.mark.parametrize("error", [ObjectMissing, StoreDenied])
def test_a_lasting_error_is_not_retried(error: type[StoreError]) -> None:
    """A missing object and a denial are not retried."""
    failing = Failing(error)
    with pytest.raises(error):
        read_by(failing)
    assert failing.asked == 1


def test_retries_end() -> None:
    """After `READ_WITHIN_S` the error is raised."""
    failing = Failing(*[StoreUnavailable] * 50)
    with pytest.raises(StoreUnavailable):
        read_by(failing, READ_WITHIN_S * 0.4)
    assert failing.asked == 3


def test_a_client_that_should_stop_asks_once() -> None:
    """If `should_stop` returns True, as after another rank's time-out, the client does not retry."""
    failing = Failing(*[StoreUnavailable] * 50)
    client = RetryingClient(failing, should_stop=lambda: True)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        client.read("a", 0, memoryview(bytearray(4)))
    assert failing.asked == 1
