"""One checkpoint that is committed in a bucket, described by its listing and its mark."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from replicated_ckpt.core.commit_mark import MARK_BYTES, CommitMark, decode_mark
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.bucket_client.client import ObjectClient

OF_NEWER_FORMAT = "only a newer version of replicated_ckpt reads it"


@dataclass(frozen=True)
class BucketSave:
    """One committed checkpoint in the bucket. `mark` is None for a checkpoint that stock torch wrote.

    `problem` is not empty if the checkpoint has a manifest of this package and cannot be identified: its `.metadata` has
    lost the commit mark or is archived, or its mark is OF_NEWER_FORMAT. `is_rejected`: a user has "latest" skip it.
    """

    checkpoint_id: str
    mark: CommitMark | None
    sizes: Mapping[str, int]
    """Bytes of each shard's object, by the shard's name."""
    metadata_bytes: int
    """Bytes of `.metadata` without the mark."""
    problem: str = ""
    is_rejected: bool = False

    @property
    def save_id(self) -> str:
        """The save's id. For stock torch's checkpoint it is derived from name and size, alike for every reader."""
        if self.mark is not None:
            return self.mark.save_id
        return hashlib.sha256(f"{self.checkpoint_id}/{self.metadata_bytes}".encode()).hexdigest()[:32]

    @property
    def holding(self) -> Holding:
        """The save as a holding of the inventory. Without a mark it has no sequence, and counts as the oldest."""
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
            is_slim=self.mark is not None and self.mark.is_slim,
        )


def is_superseded(manifest: Manifest, there: BucketSave | None) -> bool:
    """Whether `there` must not be replaced by this save. Another run's may be if overwrite was asked for, or if older."""
    if there is None or there.mark is None or there.save_id in (manifest.save_id, manifest.replaces_in_bucket):
        return False
    if there.mark.lineage != manifest.lineage:
        # Sequences of two lineages do not compare: the clock is all that is left.
        return there.mark.created_unix_s > manifest.created_unix_s
    return there.mark.version.is_newer_than(manifest.version)


def read_mark(client: ObjectClient, checkpoint_id: str, size_bytes: int) -> CommitMark | None:
    """The mark at the end of a `.metadata` of this size; None if there is none, as when its size has changed since.

    Raises:
        ManifestVersionUnknown, ObjectMissing, StoreError
    """
    tail = bytearray(min(size_bytes, MARK_BYTES))
    try:
        client.read(f"{checkpoint_id}/{METADATA_NAME}", size_bytes - len(tail), memoryview(tail))
    except ObjectCorrupt:  # shorter than listed: it was replaced meanwhile
        return None
    return decode_mark(tail)
