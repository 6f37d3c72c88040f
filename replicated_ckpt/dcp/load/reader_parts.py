"""The parts of a reader that outlive a load; its bucket is open as long as a load or a look lasts."""

from collections.abc import Callable
from dataclasses import dataclass, field

from replicated_ckpt.config import ReaderConfig
from replicated_ckpt.dcp.load.item_reader import ItemReader
from replicated_ckpt.dcp.load.report import LoadReport
from replicated_ckpt.dcp.runtime.caller import Line
from replicated_ckpt.dcp.runtime.gc_pause import Pause
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensors
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import LOOK_WITHIN_S, READ_WITHIN_S, RetryingClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore


class ReaderBucket:
    """Opened by its first use, closed by `close`: a client hangs in a process that was forked with it. One thread."""

    def __init__(self, target: ObjectTarget | None, *, is_all: bool) -> None:
        """`is_all`: there is no other source, so a look at it gets as much time as a read."""
        self._target = target
        self._look_s = READ_WITHIN_S if is_all else LOOK_WITHIN_S
        self._bucket: Bucket | None = None
        self._is_over: Callable[[], bool] = lambda: False

    def share_timeout(self, should_stop: Callable[[], bool]) -> None:
        """Until `close`, `should_stop` ends the waits for a bucket that another rank or thread has found silent."""
        self._is_over = should_stop

    def open(self) -> Bucket | None:
        """The bucket; None if the reader was given none."""
        if self._bucket is None and self._target is not None:
            # A new load waits for the bucket anew, whatever the one before it met.
            self._is_over = lambda: False
            client = open_client(self._target)
            self._bucket = Bucket(RetryingClient(client, look_within_s=self._look_s, should_stop=self._should_stop))
        return self._bucket

    def _should_stop(self) -> bool:
        return self._is_over()

    def close(self) -> None:
        """Closes the connections; a thread that still waits for an answer retries no more. It may be opened again."""
        if self._bucket is not None:
            self._bucket.client.close()
            self._bucket = None
        self._is_over = lambda: True


@dataclass(frozen=True)
class ReaderParts:
    """The parts of a reader that outlive a load. `planning`: the pause of garbage collection while DCP plans a load."""

    config: ReaderConfig
    store: LocalStore
    bucket: ReaderBucket
    items: ItemReader
    stored: StoredTensors
    expect_partial: bool
    made_at: Line | None
    on_load: Callable[[LoadReport], object] | None
    planning: Pause = field(default_factory=Pause)
