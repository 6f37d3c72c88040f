"""Inspection of a bucket: reads every byte of each committed checkpoint and compares it with its checksums."""

from collections.abc import Iterator, Sequence

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.upkeep.repair_plan import Finding, Problem
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.bucket.bucket import OF_NEWER_FORMAT, Bucket, BucketSave, ObjectShard
from replicated_ckpt.stores.verified import Expected

PIECE_BYTES = 16 << 20


class BucketInspector:
    """One inspection of a bucket, or of one checkpoint in it.

    `unchecked` are the checkpoints of stock torch, which have no checksums. `newer` are the checkpoints that only a newer
    version of the package reads. `checkpoint_ids` are all others.

    Raises:
        StoreDenied, StoreUnavailable, StoreError: the bucket cannot be read; the rest was not inspected.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.bytes_read = 0
        self.checkpoint_ids: list[str] = []
        self.unchecked: list[str] = []
        self.newer: list[str] = []

    def inspect(self, checkpoint_id: str | None = None) -> Iterator[Finding]:
        for save in self.list_saves(checkpoint_id):
            yield from self.inspect_save(save)

    def list_saves(self, checkpoint_id: str | None = None) -> Sequence[BucketSave]:
        """The committed saves of one checkpoint or of all. Their shards are not read."""
        if checkpoint_id is None:
            return self._bucket.saves()
        found = self._bucket.save_of(checkpoint_id)
        return () if found is None else (found,)

    def inspect_save(self, save: BucketSave) -> Iterator[Finding]:
        if save.problem == OF_NEWER_FORMAT:
            self.newer.append(save.checkpoint_id)
            return
        self.checkpoint_ids.append(save.checkpoint_id)
        if save.problem:
            yield self._finding(save, METADATA_NAME, Problem.CORRUPT, "a commit mark", save.problem)
        elif save.mark is None:
            self.unchecked.append(save.checkpoint_id)
        else:
            yield from self._of_save(save)

    def _of_save(self, save: BucketSave) -> Iterator[Finding]:
        assert save.mark is not None
        expected = f"CRC32C {save.mark.metadata_crc32c:08x}"
        try:
            raw = self._bucket.small(f"{save.checkpoint_id}/{METADATA_NAME}", save.metadata_bytes)
            self.bytes_read += len(raw)
            found = f"CRC32C {crc32c(raw):08x}"
        except ObjectCorrupt as exc:
            found = exc.detail
        if found != expected:
            yield self._finding(save, METADATA_NAME, Problem.CORRUPT, expected, found)
        try:
            manifest = decode_manifest(self._bucket.manifest_raw(save), self._bucket.client.target.url)
        except ManifestVersionUnknown:
            self.checkpoint_ids.remove(save.checkpoint_id)
            self.newer.append(save.checkpoint_id)
            return
        except ManifestInvalid as exc:
            yield self._finding(save, MANIFEST_NAME, Problem.CORRUPT, "the manifest that was committed", exc.message)
            return
        except ObjectMissing:
            yield self._finding(save, MANIFEST_NAME, Problem.MISSING, "a manifest", "none")
            return
        for name in sorted(manifest.shards):
            yield from self._of_shard(save, manifest, name)

    def _of_shard(self, save: BucketSave, manifest: Manifest, name: str) -> Iterator[Finding]:
        entry = manifest.shards[name]
        expected = f"{entry.size_bytes} bytes of CRC32C {entry.crc32c:08x}"
        size = save.sizes.get(name)
        if size != entry.size_bytes:
            problem = Problem.MISSING if size is None else Problem.CORRUPT
            yield self._finding(save, name, problem, expected, "none" if size is None else f"{size} bytes")
            return
        prefix = save.mark.prefix if save.mark else ""
        try:
            shard = ObjectShard(
                self._bucket, f"{save.checkpoint_id}/{prefix}{name}", Expected(entry.size_bytes, entry.crc32c)
            ).open()
            data_bytes = shard.table.data_bytes
            for offset in range(0, data_bytes, PIECE_BYTES):
                self.bytes_read += len(shard.read(offset, min(PIECE_BYTES, data_bytes - offset)))
        except ObjectCorrupt as exc:
            yield self._finding(save, name, Problem.CORRUPT, expected, exc.detail)

    def _finding(self, save: BucketSave, name: str, problem: Problem, expected: str, found: str) -> Finding:
        prefix = save.mark.prefix if save.mark and name != METADATA_NAME else ""
        path = f"{self._bucket.client.target.url}/{save.checkpoint_id}/{prefix}{name}"
        return Finding(OBJECT_NODE, save.checkpoint_id, save.save_id, name, path, problem, expected, found)
