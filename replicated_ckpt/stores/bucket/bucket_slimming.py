"""Slimming in a bucket: a committed save loses its optimizer, by one replacement of `.metadata` with its mark."""

import logging
from dataclasses import replace

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.parts import is_optimizer_of
from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt
from replicated_ckpt.stores.bucket.bucket import SLIM_MANIFEST_NAME, Bucket
from replicated_ckpt.stores.bucket.bucket_save import BucketSave

log = logging.getLogger(__name__)


def slim_in_bucket(bucket: Bucket, checkpoint_id: str, save_id: str) -> bool:
    """Removes the optimizer of a committed save, or the part of it that an earlier try has left. Returns False if there
    is none.

    At every instant the checkpoint is full or has exactly its weights. Any number of agents may call this at once.

    Raises:
        ManifestInvalid, ObjectCorrupt: its manifest or metadata is damaged; the checkpoint is unchanged. StoreError
    """
    key = f"{checkpoint_id}/{METADATA_NAME}"
    version, there = bucket.client.version(key), bucket.save_of(checkpoint_id)
    if there is None or there.mark is None or there.save_id != save_id:
        return False
    manifest = decode_manifest(bucket.manifest_raw(there), bucket.client.target.url)
    if not manifest.is_slim:
        if manifest.weights is None:
            return False
        _mark(bucket, there, manifest, version)
        failpoints.reach("upload.slim-marked")
        there = bucket.save_of(checkpoint_id)
        # Read back: another agent may have replaced it, or the store may have lost the answer.
        if there is None or there.mark is None or there.save_id != save_id or not there.mark.is_slim:
            return False
    return _remove_optimizer(bucket, there)


def _mark(bucket: Bucket, there: BucketSave, full: Manifest, version: str) -> None:
    """Replaces the mark of the full save by that of its weights. Their manifest is written first, under a name of its
    own.
    """
    assert there.mark is not None
    assert full.weights is not None
    slim, key = full.slimmed(), f"{there.checkpoint_id}/{METADATA_NAME}"
    raw = bucket.small(key, there.metadata_bytes, there.mark.metadata_crc32c)
    smaller = raw[-(full.weights.bucket_bytes or full.weights.local_bytes) :]
    wanted = slim.metadata_crc32c if slim.upload is None else slim.upload.metadata_crc32c
    if (crc32c(raw), crc32c(smaller)) != (there.mark.metadata_crc32c, wanted):
        raise ObjectCorrupt(bucket.client.target.url, "slim", key, "it does not match its manifest")
    raw_manifest = slim.encode()
    bucket.client.put(f"{there.checkpoint_id}/{there.mark.prefix}{SLIM_MANIFEST_NAME}", raw_manifest)
    mark = replace(there.mark, manifest_crc32c=crc32c(raw_manifest), metadata_crc32c=wanted, is_slim=True)
    bucket.client.put_over(key, smaller + mark.encode(), version)


def _remove_optimizer(bucket: Bucket, there: BucketSave) -> bool:
    """Gives the smaller manifest the usual name, then deletes the optimizer's objects. Repeated while one is left."""
    assert there.mark is not None
    directory = f"{there.checkpoint_id}/{there.mark.prefix}"
    raw = bucket.manifest_raw(there)
    manifest = decode_manifest(raw, bucket.client.target.url)
    if not manifest.is_slim:
        raise ManifestInvalid(f"The manifest at {directory} is not that of its mark.")
    left = sorted(name for name in there.sizes if is_optimizer_of(name, manifest.shards))
    bucket.client.put(f"{directory}{MANIFEST_NAME}", raw)
    bucket.client.delete([f"{directory}{SLIM_MANIFEST_NAME}"])
    bucket.client.delete([f"{directory}{name}" for name in left])
    return bool(left)
