"""One checkpoint that is committed in a bucket, as a look at its listing and its mark tells of it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from replicated_ckpt.core.bucket.commit_mark import MARK_BYTES, CommitMark, decode_mark
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.bucket_client.client import ObjectClient

OF_NEWER_FORMAT = "only a newer replicated_ckpt reads it"


@dataclass(frozen=True)
class BucketSave:
    """One committed checkpoint in the bucket. `mark` is None for one that stock torch wrote.

    `problem` is not empty where no look can tell whose it is and what it should be: it is one of ours, by the manifest that
    lies there, and its `.metadata` has lost the mark; or that is archived; or its mark is OF_NEWER_FORMAT.
    """

    checkpoint_id: str
    mark: CommitMark | None
    sizes: Mapping[str, int]
    """Bytes of each shard's object, by the shard's name."""
    metadata_bytes: int
    """Of `.metadata`, the mark not counted."""
    problem: str = ""

    @property
    def save_id(self) -> str:
        """The save's id; one made up from the name, the same for every reader, where stock torch wrote it."""
        if self.mark is not None:
            return self.mark.save_id
        return hashlib.sha256(f"{self.checkpoint_id}/{self.metadata_bytes}".encode()).hexdigest()[:32]

    @property
    def holding(self) -> Holding:
        """It as the inventory has it. One without a mark has no place in the order: it is older than any other."""
        sequence, created = (self.mark.sequence, self.mark.created_unix_s) if self.mark else (0, 0.0)
        return Holding(
            OBJECT_NODE,
            self.checkpoint_id,
            self.save_id,
            sequence,
            True,
            self.sizes,
            created_unix_s=created,
            lineage=self.mark.lineage if self.mark else "",
        )


def is_superseded(manifest: Manifest, there: BucketSave | None) -> bool:
    """Whether a save may not be committed over the one there. Another run's yields if overwritten there, or older."""
    if there is None or there.mark is None or there.save_id in (manifest.save_id, manifest.replaces_in_bucket):
        return False
    if there.mark.lineage != manifest.lineage:
        return there.mark.created_unix_s > manifest.created_unix_s
    return there.mark.version.is_newer_than(manifest.version)


def read_mark(client: ObjectClient, checkpoint_id: str, size_bytes: int) -> CommitMark | None:
    """The mark behind a `.metadata` of so many bytes; None if none lies there, as where it has another size by now.

    Raises:
        ManifestVersionUnknown, ObjectMissing, StoreError
    """
    tail = bytearray(min(size_bytes, MARK_BYTES))
    try:
        client.read(f"{checkpoint_id}/{METADATA_NAME}", size_bytes - len(tail), memoryview(tail))
    except ObjectCorrupt:  # it ends before
        return None
    return decode_mark(tail)
