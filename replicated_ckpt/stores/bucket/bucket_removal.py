"""Removal from a bucket: of a whole save, committed or not, or of a committed save's optimizer alone."""

import logging
from dataclasses import replace

from replicated_ckpt import failpoints
from replicated_ckpt.core.commit_mark import own_prefix
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, is_save_id
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest
from replicated_ckpt.core.parts import is_optimizer_of
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectCorrupt, ObjectMissing, StoreError
from replicated_ckpt.stores.bucket.bucket import (
    SLIM_MANIFEST_NAME,
    Bucket,
    BucketSave,
    is_superseded,
    key_of,
    prefix_of,
)

log = logging.getLogger(__name__)


def remove_save(bucket: Bucket, checkpoint_id: str, save_id: str, manifest: Manifest | None) -> bool:
    """Deletes a save. Returns whether it was committed there.

    If it was not committed, the uploaded shards that `manifest` names are deleted. With None they are unknown, and stay. An
    upload in progress deletes the objects that it adds after this.

    Raises:
        StoreError: some of it is still there.
    """
    there = bucket.save_of(checkpoint_id)
    if there is not None and there.save_id == save_id:
        bucket.remove(there)
        return True
    if manifest is not None and _is_its_own_place(manifest, there):
        bucket.client.delete(_list_arrived(bucket, manifest))
        _end_unfinished(bucket, manifest)
    return False


def remove_superseded(bucket: Bucket, manifest: Manifest, there: BucketSave) -> None:
    """Deletes the remains of the saves that the committed save `manifest` has replaced.

    They stay behind if an agent ends during its commit, or gets no answer. The manifest of a replaced save is deleted last,
    since it leads to the rest. A place without a manifest was never committed; its upload may be in progress, so it stays.

    Raises:
        StoreError: some of it is still there.
    """
    listing = bucket.client.list_keys(f"{manifest.checkpoint_id}/")
    places = {own_prefix(name) for name in listing.directories if is_save_id(name)}
    if MANIFEST_NAME in listing.sizes:
        places.add("")
    for place in places - {prefix_of(manifest)}:
        left = _read_manifest(bucket, f"{manifest.checkpoint_id}/{place}")
        # A manifest that a user copied here names other objects than those beside it.
        if left is None or (left.checkpoint_id, prefix_of(left)) != (manifest.checkpoint_id, place):
            continue
        if left.save_id == manifest.replaces_in_bucket or is_superseded(left, there):
            bucket.remove_described(f"{left.checkpoint_id}/{place}", left.shards)
            log.info("removed what was left of save %s of %s", left.save_id, left.checkpoint_id)


def _read_manifest(bucket: Bucket, directory: str) -> Manifest | None:
    key = f"{directory}{MANIFEST_NAME}"
    try:
        raw = bucket.small(key, min(bucket.client.size_bytes(key), MANIFEST_BYTES_MAX))
        return decode_manifest(raw, bucket.client.target.url)
    except (ObjectMissing, ObjectCorrupt, ManifestInvalid, ManifestVersionUnknown):
        return None


def _is_its_own_place(manifest: Manifest, there: BucketSave | None) -> bool:
    """Whether no other, committed save has its files in the same place of the bucket."""
    return bool(prefix_of(manifest)) or there is None or (there.mark is not None and bool(there.mark.prefix))


def _end_unfinished(bucket: Bucket, manifest: Manifest) -> None:
    """Ends uploads that no later commit will end. Only logs errors: credentials often may not list uploads."""
    try:
        bucket.client.end_unfinished(key_of(manifest, "__"), 0)
    except StoreError as exc:
        log.warning("parts of %s may stay in the bucket, in unfinished uploads: %s", manifest.checkpoint_id, exc)


def _list_arrived(bucket: Bucket, manifest: Manifest) -> list[str]:
    """Objects whose content belongs to this save. Without a prefix of its own, another job may use the same keys."""
    shards = [name for name in bucket.find_arrived(manifest) if bucket.is_intact(manifest, name)]
    described = [MANIFEST_NAME] if _is_manifest_there(bucket, manifest) else []
    return [key_of(manifest, name) for name in (*described, *sorted(shards))]


def _is_manifest_there(bucket: Bucket, manifest: Manifest) -> bool:
    key, raw = key_of(manifest, MANIFEST_NAME), manifest.encode()
    try:
        return bucket.client.size_bytes(key) == len(raw) and bucket.small(key, len(raw)) == raw
    except (ObjectMissing, ObjectCorrupt):
        return False


def slim_in_bucket(bucket: Bucket, checkpoint_id: str, save_id: str) -> bool:
    """Removes the optimizer of a committed save, or the part of it that an earlier try has left. Returns False if there
    is none.

    One write replaces `.metadata` with its mark: at every instant the checkpoint is full or has exactly its weights. Any
    number of agents may call this at once.

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
    """Writes the slimmed save's manifest under its own name, then replaces the full save's mark by the slimmed save's."""
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
    """Gives the smaller manifest the usual name, then deletes the optimizer's objects. Returns whether any was left."""
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
