"""A retrying client asks again while the bucket is unavailable, for a bounded time, and for nothing else."""

from collections.abc import Iterator

import pytest

from replicated_ckpt.errors import ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import READ_WITHIN_S, RetryingClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget


class Failing:
    """Stands before a client in memory; its first answers are errors."""

    def __init__(self, *errors: type[StoreError]) -> None:
        self.client = open_client(ObjectTarget.check_supported("memory://patient/x", None))
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
    """Until it is answered."""
    failing = Failing(StoreUnavailable, StoreUnavailable)
    assert read_by(failing) == b"abcd"
    assert failing.asked == 3


@pytest.mark.parametrize("error", [ObjectMissing, StoreDenied])
def test_what_does_not_pass_is_not_waited_for(error: type[StoreError]) -> None:
    """A missing object stays missing, and who is denied stays denied."""
    failing = Failing(error)
    with pytest.raises(error):
        read_by(failing)
    assert failing.asked == 1


def test_patience_ends() -> None:
    """After so many seconds the error is the caller's."""
    failing = Failing(*[StoreUnavailable] * 50)
    with pytest.raises(StoreUnavailable):
        read_by(failing, READ_WITHIN_S * 0.4)
    assert failing.asked == 3


def test_what_another_has_given_up_is_asked_once() -> None:
    """It has waited as long as this one would."""
    failing = Failing(*[StoreUnavailable] * 50)
    client = RetryingClient(failing, should_stop=lambda: True)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        client.read("a", 0, memoryview(bytearray(4)))
    assert failing.asked == 1
