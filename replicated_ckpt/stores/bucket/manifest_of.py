"""The manifest of a checkpoint in a bucket: ours as it lies there, or one made up for what stock torch wrote."""

from replicated_ckpt.core.layout import OBJECT_NODE, ShardName
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_save import BucketSave


def manifest_in(bucket: Bucket, save: BucketSave) -> bytes:
    """The manifest of a save in the bucket; one that tells sizes and no checksums for what stock torch wrote there.

    Raises:
        ManifestInvalid, ObjectMissing, StoreError
    """
    if save.mark is not None:
        return bucket.manifest_raw(save)
    shards = {
        name: ShardEntry(size, 0, shard.rank, OBJECT_NODE, (OBJECT_NODE,))
        for name, size in save.sizes.items()
        if (shard := ShardName.parse(name)) is not None
    }
    ranks = tuple(sorted({entry.owner_rank for entry in shards.values()}))
    node = NodeEntry(OBJECT_NODE, bucket.client.target.url, None, ranks)
    return Manifest(
        save_id=save.save_id,
        checkpoint_id=save.checkpoint_id,
        sequence=0,
        created_unix_s=0.0,
        world_size=len(ranks),
        copies=1,
        metadata_bytes=save.metadata_bytes,
        metadata_crc32c=0,
        nodes=(node,),
        shards=shards,
    ).encode()
