"""A client that reads again what a bucket could not give at once: a load from it must outlive a moment of faults."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from replicated_ckpt.errors import ObjectCorrupt, StoreDenied, StoreUnavailable
from replicated_ckpt.stores.bucket_client.client import Listing, ObjectClient, Paced
from replicated_ckpt.stores.bucket_client.upload_source import UploadSource

T = TypeVar("T")
READ_WITHIN_S, LOOK_WITHIN_S = 60.0, 3.0
"""No try begins later than that after the first: of a read, and of a look where nodes are asked as well.

One that hangs takes the client's own time-out, too.
"""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.2, 5.0
_CHANCE = random.Random()  # noqa: S311 - chance, not secrecy; the process's own generator is training's


class RetryingClient:
    """An ObjectClient whose reads are tried again while it is unavailable, and once more if an answer was cut short.

    So are removals. Writes are the uploader's to repeat. Safe for concurrent use as far as the client in it is.
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
        """`should_stop`: whether another one has waited for the bucket in vain by now; then nothing is tried again."""
        self.target = client.target
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

    def delete(self, keys: Sequence[str]) -> None:
        """As the client's. One that may not be deleted, as a legal hold is on it, keeps none of the others."""
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
                self._sleep(pause_s * _CHANCE.uniform(0.5, 1.0))
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
