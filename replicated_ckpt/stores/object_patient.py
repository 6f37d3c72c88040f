"""An ObjectClient that asks again: for whoever reads a bucket and has no other loop that would."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.object_client import Listing, ObjectClient, Paced
from replicated_ckpt.stores.upload_source import UploadSource

T = TypeVar("T")
LOOK_S, READ_S = 3.0, 30.0
"""No further try after so long: of a look, which has the nodes beside it, and of a read, which may be all there is."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0


class PatientClient:
    """Repeats what reads while the bucket is unavailable, throttled above all; writes pass. See ObjectClient."""

    def __init__(self, client: ObjectClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = client.target
        self._client = client
        self._clock = clock

    def _asked(self, ask: Callable[[], T], within_s: float) -> T:
        deadline, pause_s = self._clock() + within_s, PAUSE_FIRST_S
        while True:
            try:
                return ask()
            except StoreUnavailable:
                if self._clock() + pause_s > deadline:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - chance, not secrecy
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def listed(self, directory: str) -> Listing:
        return self._asked(lambda: self._client.listed(directory), LOOK_S)

    def size_bytes(self, key: str) -> int:
        return self._asked(lambda: self._client.size_bytes(key), LOOK_S)

    def read(self, key: str, offset: int, target: memoryview) -> None:
        self._asked(lambda: self._client.read(key, offset, target), READ_S)

    def put(self, key: str, data: bytes) -> None:
        self._client.put(key, data)

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        self._client.put_shard(key, source, paced)

    def delete(self, keys: Sequence[str]) -> None:
        self._client.delete(keys)

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        return self._client.end_unfinished(prefix, older_than_s)

    def close(self) -> None:
        self._client.close()
