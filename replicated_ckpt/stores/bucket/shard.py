"""One shard in a bucket, by verified ranges; or item by item, where it has no checksums of ours."""

from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.unmanaged.shard import UncheckedItems, UnmanagedShard
from replicated_ckpt.stores.verified import Expected, VerifiedShard


class ObjectShard(VerifiedShard):
    """Reads one shard from a bucket by verified ranges. One thread. The bucket's client is shared and stays open."""

    def __init__(self, bucket: Bucket, key: str, expected: Expected) -> None:
        self._bucket = bucket
        self._key = key
        super().__init__(bucket.client.target.url, key, expected)

    def _fill(self, target: memoryview, offset: int) -> None:
        self._bucket.client.read(self._key, offset, target)

    def close(self) -> None:
        """Nothing: the bucket is its owner's."""


class UnmanagedObjectShard(ObjectShard, UnmanagedShard):
    """A shard without a mark: stock torch wrote it; or a user has copied a node's files there."""

    def __init__(self, bucket: Bucket, key: str, expected: Expected, items: UncheckedItems) -> None:
        self._bucket = bucket
        self._key = key
        UnmanagedShard.__init__(self, bucket.client.target.url, key, expected, items)

    def _connect(self) -> None:
        found = self._bucket.client.size_bytes(self._key)
        if found != self._expected.size_bytes:
            raise self._corrupt(f"expected {self._expected.size_bytes} bytes, found {found}")
