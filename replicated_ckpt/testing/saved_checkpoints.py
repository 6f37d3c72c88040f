"""A checkpoint of one shard, committed to a bucket as an agent does it."""

from dataclasses import replace
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, UploadEntry
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.testing.shard_files import add_footer, expect, make_data, open_source

METADATA = b"metadata" * 50
SHARD = "__0_0.distcp"
NODE = "0" * 31 + "1"


def save_to_bucket(bucket: Bucket, folder: Path, *, sequence: int) -> Manifest:
    """Uploads and commits step-1; one with a sequence above 1 may replace another, so it has a prefix of its own."""
    raw, _ = add_footer(make_data(seed=sequence))
    expected = expect(raw)
    manifest = Manifest(
        save_id=f"{sequence:032x}",
        checkpoint_id="step-1",
        sequence=sequence,
        created_unix_s=0.0,
        world_size=1,
        copies=1,
        metadata_bytes=len(METADATA),
        metadata_crc32c=crc32c(METADATA),
        nodes=(NodeEntry(NODE, "host", None, (0,)),),
        shards={SHARD: ShardEntry(expected.size_bytes, expected.crc32c, 0, NODE, (NODE,))},
    )
    upload = UploadEntry(bucket.client.target.url, sequence > 1, len(METADATA), crc32c(METADATA))
    manifest = replace(manifest, upload=upload)
    with open_source(folder, raw) as source:
        bucket.put_shard(manifest, SHARD, source, lambda _: None)
    bucket.commit(manifest, manifest.encode(), METADATA)
    return manifest
