"""Removal of a save from a bucket, committed or not, with the parts of an upload in progress."""

import logging

from replicated_ckpt.core.commit_mark import own_prefix
from replicated_ckpt.core.layout import MANIFEST_NAME, is_save_id
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectCorrupt, ObjectMissing, StoreError
from replicated_ckpt.stores.bucket.bucket import Bucket, key_of, prefix_of
from replicated_ckpt.stores.bucket.bucket_save import BucketSave, is_superseded

log = logging.getLogger(__name__)


def remove_save(bucket: Bucket, checkpoint_id: str, save_id: str, manifest: Manifest | None) -> bool:
    """Deletes a save. Returns whether it was committed there.

    If it was not, the shards that `manifest` names and that have arrived are deleted; with None they are unknown and stay.
    An upload in progress deletes the objects that it adds after this.

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
    """Whether no other save that is committed there has its files in the same place."""
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
