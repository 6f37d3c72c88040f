"""One shard in a bucket, by verified ranges; or by plain ones, where no checksums were taken when it was written."""

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.integrity.own_footer import find_footer
from replicated_ckpt.stores.bucket.bucket import Bucket
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


class UncheckedShard(ObjectShard):
    """A shard without a mark: its bytes are as good as the zip containers that they form, or held against a footer of ours.

    Stock torch wrote it; or a user has copied a node's files there.
    """

    _has_footer = False

    def _read_table(self, expected: Expected) -> BlockTable:
        found = self._bucket.client.size_bytes(self._key)
        if found != expected.size_bytes:
            raise self._corrupt(f"expected {expected.size_bytes} bytes, found {found}")
        footer = find_footer(lambda offset, length: self._fetch(offset, offset + length), expected.size_bytes)
        if footer.is_damaged:
            raise self._corrupt("its footer of block checksums is damaged")
        if footer.table is not None:
            self._has_footer = True
            return footer.table
        return BlockTable(expected.size_bytes or 1, expected.size_bytes, (0,))

    def read(self, offset: int, length: int, lent: memoryview | None = None) -> memoryview:
        """Bytes [offset, offset + length) of the file, as the bucket gives them; otherwise as VerifiedShard.read."""
        if self._has_footer:
            return super().read(offset, length, lent)
        if length < 0 or offset < 0 or offset + length > self.table.data_bytes:
            raise self._corrupt(f"bytes {offset} to {offset + length} lie outside its {self.table.data_bytes} bytes")
        span = self._reuse(length, lent)
        self._fill(span, offset)
        return span
