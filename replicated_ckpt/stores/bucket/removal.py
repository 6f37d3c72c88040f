"""A save goes from a bucket: committed there or not, with what an upload that goes on has brought of it."""

from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.bucket.bucket import Bucket, key_of, prefix_of
from replicated_ckpt.stores.bucket.bucket_save import BucketSave


def remove_save(bucket: Bucket, checkpoint_id: str, save_id: str, manifest: Manifest | None) -> bool:
    """Deletes a save. Returns whether it was committed there.

    If it is not, the shards go that have arrived of it, as `manifest` names them; None: what they are is not known. An
    upload that goes on meanwhile removes by itself what it brings after this.

    Raises:
        StoreError: some of it is still there.
    """
    there = bucket.save_of(checkpoint_id)
    if there is not None and there.save_id == save_id:
        bucket.remove(there)
        return True
    if manifest is not None and _is_its_own_place(manifest, there):
        bucket.client.delete(_list_arrived(bucket, manifest))
    return False


def _is_its_own_place(manifest: Manifest, there: BucketSave | None) -> bool:
    """Whether no other save that is committed there has its files in the same place."""
    return bool(prefix_of(manifest)) or there is None or (there.mark is not None and bool(there.mark.prefix))


def _list_arrived(bucket: Bucket, manifest: Manifest) -> list[str]:
    """What is there and is this save's by its content: where it has no place of its own, another job may bring the like."""
    shards = [name for name in bucket.find_arrived(manifest) if bucket.is_intact(manifest, name)]
    described = [MANIFEST_NAME] if _is_manifest_there(bucket, manifest) else []
    return [key_of(manifest, name) for name in (*described, *sorted(shards))]


def _is_manifest_there(bucket: Bucket, manifest: Manifest) -> bool:
    key, raw = key_of(manifest, MANIFEST_NAME), manifest.encode()
    try:
        return bucket.client.size_bytes(key) == len(raw) and bucket.small(key, len(raw)) == raw
    except (ObjectMissing, ObjectCorrupt):
        return False
