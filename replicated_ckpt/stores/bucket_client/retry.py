"""A client that retries reads: a load must survive a short outage of its bucket."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from replicated_ckpt.errors import ObjectCorrupt, StoreDenied, StoreUnavailable
from replicated_ckpt.stores.bucket_client.client import Listing, ObjectClient, Paced, UploadSource

T = TypeVar("T")
READ_WITHIN_S, LOOK_WITHIN_S = 60.0, 3.0
"""Longest time from a first try to the last retry. LOOK_WITHIN_S is for listings while nodes are asked as well.

A try that hangs takes the client's own time-out in addition.
"""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.2, 5.0
_CHANCE = random.Random()  # noqa: S311 - no secret; drawing from the global generator would change the training's


class RetryingClient:
    """An ObjectClient that retries reads while the bucket is unavailable, and once more if an answer was cut short.

    It retries removals, too. The uploader retries writes. As safe for concurrent use as the wrapped client.
    """

    def __init__(
        self,
        client: ObjectClient,
        *,
        within_s: float = READ_WITHIN_S,
        look_within_s: float = READ_WITHIN_S,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`should_stop`: True once another client has waited for the bucket in vain; then nothing is retried."""
        self.target = client.target
        self.has_conditions = client.has_conditions
        self._client = client
        self._within_s = within_s
        self._look_within_s = min(within_s, look_within_s)
        self._should_stop = should_stop
        self._clock = clock
        self._sleep = sleep

    def list_keys(self, directory: str) -> Listing:
        return self._try(lambda: self._client.list_keys(directory), self._look_within_s)

    def read(self, key: str, offset: int, target: memoryview) -> None:
        try:
            self._try(lambda: self._client.read(key, offset, target), self._within_s)
        # A connection that was cut in the middle looks like a short object.
        except ObjectCorrupt:
            self._try(lambda: self._client.read(key, offset, target), self._within_s)

    def size_bytes(self, key: str) -> int:
        return self._try(lambda: self._client.size_bytes(key), self._look_within_s)

    def version(self, key: str) -> str:
        return self._try(lambda: self._client.version(key), self._look_within_s)

    def put(self, key: str, data: bytes) -> None:
        self._client.put(key, data)

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        return self._client.put_over(key, data, version)

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        self._client.put_shard(key, source, paced)

    def copy(self, source: str, key: str) -> None:
        self._client.copy(source, key)

    def delete(self, keys: Sequence[str]) -> None:
        """As the client's. An object that may not be deleted, as under a legal hold, does not stop the others."""
        denied: list[StoreDenied] = []
        for key in keys:
            try:
                self._try(partial(self._client.delete, [key]), self._within_s)
            except StoreDenied as exc:
                denied.append(exc)
        if denied:
            raise denied[0]

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        return self._client.end_unfinished(prefix, older_than_s)

    def close(self) -> None:
        self._client.close()

    def _try(self, call: Callable[[], T], within_s: float) -> T:
        deadline, pause_s = self._clock() + within_s, _PAUSE_FIRST_S
        while True:
            try:
                return call()
            except StoreUnavailable:
                if self._clock() + pause_s > deadline or self._should_stop():
                    raise
                # Jitter: all ranks of a load meet the same outage, and would return at the same instant.
                self._sleep(pause_s * _CHANCE.uniform(0.5, 1.0))
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
