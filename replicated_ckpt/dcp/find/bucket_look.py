"""A search in the bucket while the nodes are asked. A load that finds everything on the nodes does not wait for a slow
bucket.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.threads import start_worker

LOOK_WITHIN_S = 5.0


@dataclass(frozen=True)
class InBucket:
    """A save's files in the bucket. `metadata_crc32c` None: stock torch wrote it, without checksums of this package.

    `is_slim`: the bucket has dropped its optimizer.
    """

    prefix: str
    metadata_bytes: int
    metadata_crc32c: int | None
    is_slim: bool = False

    @property
    def is_unmanaged(self) -> bool:
        return self.metadata_crc32c is None

    @classmethod
    def of(cls, save: BucketSave) -> "InBucket":
        if save.mark is None:
            return cls("", save.metadata_bytes, None)
        return cls(save.mark.prefix, save.metadata_bytes, save.mark.metadata_crc32c, save.mark.is_slim)


class BucketLook:
    """One search, which runs on a thread of its own. Only the thread that made this object may use it."""

    def __init__(self, bucket: Bucket, checkpoint_id: str | None, scope: str | None = None) -> None:
        """Searches for one checkpoint; with None, for all in the directory of ids `scope`, or in all directories."""
        self.url = bucket.client.target.url
        self._bucket = bucket
        self._checkpoint_id, self._scope = checkpoint_id, scope
        self._found: Future[Sequence[BucketSave]] = Future()
        start_worker(self._look, name="rckpt-look")

    def _look(self) -> None:
        try:
            self._bucket.client.target.check_is_apart(None)  # on this thread: the share of a file:// bucket may hang
            if self._checkpoint_id is None:
                self._found.set_result(self._bucket.saves(self._scope))
            else:
                save = self._bucket.save_of(self._checkpoint_id)
                self._found.set_result(() if save is None else (save,))
        except BaseException as exc:  # noqa: BLE001 - top of a thread; the caller that asks gets it
            self._found.set_exception(exc)

    def is_over_within(self, seconds: float) -> bool:
        """Waits for at most this time. Returns whether the bucket has answered."""
        return bool(wait([self._found], seconds).done)

    def result(self) -> Sequence[BucketSave]:
        """Waits for the bucket, and returns the saves that are committed in it. Raises ReplicatedCkptError: it cannot
        be read.
        """
        return self._found.result()
