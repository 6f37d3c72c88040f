"""Checkpoints in a bucket: committed ones, the shards of a save that have arrived, and the commit itself.

<id>/__0_0.distcp ...            shards of a save that found the id free
<id>/.manifest.json              its manifest
<id>/<save_id>/...               both, of a save that may replace another
<id>/.metadata                   the commit mark, written last: it names one save
<id>/.rejected.<save_id>         a user has "latest" skip that save
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from replicated_ckpt import failpoints
from replicated_ckpt.core.commit_mark import MARK_BYTES, CommitMark, decode_mark, own_prefix
from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, crc32c, decode_footer, footer_bytes_of
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    OBJECT_NODE,
    PARTS_MAX,
    ShardName,
    is_checkpoint_id,
    is_save_id,
)
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, NodeEntry, ShardEntry
from replicated_ckpt.errors import (
    CheckpointExists,
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectCorrupt,
    ObjectMissing,
    SaveAborted,
    SaveSuperseded,
    StoreDenied,
    StoreError,
)
from replicated_ckpt.stores.bucket_client.client import ARCHIVED, Listing, ObjectClient, Paced, UploadSource
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.local.unmanaged import UncheckedItems, UnmanagedShard
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.stores.verified import Expected, VerifiedShard

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
        """The save's id. For a save of stock torch, every reader derives the same id from name and size."""
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
    """Whether the committed save `there` is newer, so that this save must not replace it.

    A newer save of another run may be replaced if overwrite was asked for when this save found it.
    """
    if there is None or there.mark is None or there.save_id in (manifest.save_id, manifest.replaces_in_bucket):
        return False
    if there.mark.lineage != manifest.lineage:
        # Sequences of two lineages cannot be compared: only the clocks are left.
        return there.mark.created_unix_s > manifest.created_unix_s
    return there.mark.version.is_newer_than(manifest.version)


def read_mark(client: ObjectClient, checkpoint_id: str, size_bytes: int) -> CommitMark | None:
    """The mark at the end of a `.metadata` of this size; None if there is none, for example if its size has changed.

    Raises:
        ManifestVersionUnknown, ObjectMissing, StoreError
    """
    tail = bytearray(min(size_bytes, MARK_BYTES))
    try:
        client.read(f"{checkpoint_id}/{METADATA_NAME}", size_bytes - len(tail), memoryview(tail))
    except ObjectCorrupt:  # shorter than listed: it was replaced meanwhile
        return None
    return decode_mark(tail)


log = logging.getLogger(__name__)

SLIM_MANIFEST_NAME = ".manifest.weights.json"
"""The manifest of a slimmed save, until it replaces the full one in `.manifest.json`."""
_REJECTED = ".rejected."
_TAIL_BYTES = 64 << 10
_OTHER_RUN = (
    "Give each run its own prefix. To upload this save there, run `replicated-ckpt upload ID --root ROOT --to URL`."
)
_TAKEN = "The nodes have this save. Save again with overwrite=True: the new save gets its own place in the bucket."
_COMMIT_TRIES = 4
_STALE_UPLOAD_S = 86400.0
"""Age from which an unfinished upload counts as stale: no save takes that long."""


class Bucket:
    """The object tier under one prefix. Safe for concurrent use. Raises the errors of ObjectClient."""

    def __init__(self, client: ObjectClient) -> None:
        self.client = client

    # Looking -----------------------------------------------------------------------------------------------------

    def saves(self, scope: str | None = None) -> tuple[BucketSave, ...]:
        """The committed checkpoints: all, or only those whose ids lie in the directory `scope` ("" for plain names).

        Sends one request for each directory and two for each checkpoint, many in parallel.
        """
        found: list[BucketSave] = []
        level = [f"{scope}/" if scope else ""]
        # Bounded: a bucket of another program may nest directories without end.
        for _ in range(PARTS_MAX + 1 if scope is None else 2):
            looked = FanOut.run(level, self._look).raise_first()
            found += [save for saves, _ in looked.values() for save in saves]
            level = [directory for _, directories in looked.values() for directory in directories]
            if not level:
                break
        return tuple(found)

    def _look(self, directory: str) -> tuple[list[BucketSave], list[str]]:
        """The checkpoint in a directory, if there is one, and the directories that may contain others."""
        listing = self.client.list_keys(directory)
        checkpoint_id = directory.rstrip("/")
        if METADATA_NAME in listing.sizes and is_checkpoint_id(checkpoint_id):
            save = self._save(checkpoint_id, listing)
            return [] if save is None else [save], []
        return [], [f"{directory}{name}/" for name in listing.directories if is_checkpoint_id(directory + name)]

    def save_of(self, checkpoint_id: str) -> BucketSave | None:
        """The committed save of one checkpoint, if there is one."""
        listing = self.client.list_keys(f"{checkpoint_id}/")
        return self._save(checkpoint_id, listing) if METADATA_NAME in listing.sizes else None

    def _save(self, checkpoint_id: str, listing: Listing) -> BucketSave | None:
        """The save of a directory with a commit mark; None if it was removed since the listing."""
        sizes, size = listing.sizes, listing.sizes[METADATA_NAME]
        is_ours = MANIFEST_NAME in sizes or any(map(is_save_id, listing.directories))
        problem = "its commit mark is damaged"
        try:
            mark = read_mark(self.client, checkpoint_id, size)
            if mark is None and is_ours:  # damaged, or overwritten since the listing: its size differs then
                size = self.client.size_bytes(f"{checkpoint_id}/{METADATA_NAME}")
                mark = read_mark(self.client, checkpoint_id, size)
        except ObjectMissing:
            return None
        # A newer version's checkpoint must look neither damaged nor like one of stock torch.
        except ManifestVersionUnknown:
            is_ours, mark, problem = True, None, OF_NEWER_FORMAT
        except StoreDenied as exc:
            # One archived checkpoint must not end the look at all others.
            if not exc.detail.startswith(ARCHIVED):
                raise
            is_ours, mark, problem = True, None, f"it is archived, and must be restored there ({exc.detail})"
        is_rejected = mark is not None and f"{_REJECTED}{mark.save_id}" in sizes
        if mark is not None and mark.has_own_prefix:
            sizes = self.client.list_keys(f"{checkpoint_id}/{mark.prefix}").sizes
        shards = {name: size for name, size in sizes.items() if ShardName.parse(name) is not None}
        is_torn = is_ours and mark is None
        metadata_bytes, problem = size - (MARK_BYTES if mark else 0), problem if is_torn else ""
        return BucketSave(checkpoint_id, mark, shards, metadata_bytes, problem, is_rejected)

    def is_empty(self, checkpoint_id: str) -> bool:
        """Whether no object lies under a checkpoint's name. Raises if the bucket cannot be reached."""
        listing = self.client.list_keys(f"{checkpoint_id}/")
        return not listing.sizes and not listing.directories

    def manifest_raw(self, save: BucketSave) -> bytes:
        """The manifest of a committed save, verified by the checksum in its mark.

        Raises:
            ManifestInvalid: its checksum differs from the mark's. ObjectMissing: stock torch's checkpoint has no manifest.
        """
        if save.mark is None:
            raise ObjectMissing(self.client.target.url, "read", f"{save.checkpoint_id}/{MANIFEST_NAME}", "no such file")
        directory = f"{save.checkpoint_id}/{save.mark.prefix}"
        if save.mark.is_slim:
            # During slimming, `.manifest.json` may still be that of the full save. After it, this file is the only one.
            with contextlib.suppress(ManifestInvalid, ObjectMissing):
                return self._manifest_at(f"{directory}{SLIM_MANIFEST_NAME}", save.mark)
        return self._manifest_at(f"{directory}{MANIFEST_NAME}", save.mark)

    def _manifest_at(self, key: str, mark: CommitMark) -> bytes:
        size = self.client.size_bytes(key)
        raw = self.small(key, min(size, MANIFEST_BYTES_MAX + 1), mark.manifest_crc32c)
        if crc32c(raw) != mark.manifest_crc32c:
            raise ManifestInvalid(f"The manifest at {self.client.target.url}/{key} is not the one that was committed.")
        return raw

    def is_described(self, save: BucketSave) -> bool:
        """Whether the save's manifest is there, with the checksum in its mark."""
        try:
            return bool(self.manifest_raw(save))
        except (ManifestInvalid, ObjectMissing, ObjectCorrupt):
            return False

    def small(self, key: str, size_bytes: int, crc: int | None = None) -> bytes:
        """The first bytes of an object, read again if their checksum is not `crc`.

        Raises:
            ObjectCorrupt: the object is shorter, or the size exceeds FILE_BYTES_MAX. StoreError
        """
        if not 0 <= size_bytes <= FILE_BYTES_MAX:
            raise ObjectCorrupt(self.client.target.url, "read", key, f"its listed size is {size_bytes} bytes")
        raw = bytearray(size_bytes)
        for _ in range(2):
            self.client.read(key, 0, memoryview(raw))
            # The object may have been replaced between two reads of its parts.
            if crc in (None, crc32c(raw)):
                break
        return bytes(raw)

    # Uploading ---------------------------------------------------------------------------------------------------

    def put_shard(self, manifest: Manifest, name: str, source: UploadSource, paced: Paced) -> None:
        """Uploads one shard of a save to the key that its manifest implies.

        Raises:
            SaveAborted, SaveSuperseded, CheckpointExists: it would overwrite a shard of another, committed save.
        """
        # Without a prefix of its own, this save's shards have the same keys as those of the committed save.
        if not prefix_of(manifest):
            self.check_place(manifest, self.save_of(manifest.checkpoint_id))
        self.client.put_shard(key_of(manifest, name), source, paced)
        failpoints.reach("upload.shard-arrived")

    def copy_shard(self, manifest: Manifest, name: str, source: str) -> bool:
        """Copies the object `source` of this bucket as a shard of a save. False: that failed, and it must be uploaded.

        Raises as `put_shard`.
        """
        if not prefix_of(manifest):
            self.check_place(manifest, self.save_of(manifest.checkpoint_id))
        key = key_of(manifest, name)
        try:
            self.client.copy(source, key)
            is_whole = self.client.size_bytes(key) == manifest.shards[name].size_bytes
            is_copied = is_whole and self.is_intact(manifest, name)
        except StoreError as exc:
            log.info("%s is uploaded, as the bucket does not copy it: %s", key, exc.message)
            return False
        failpoints.reach("upload.shard-arrived")
        return is_copied

    def find_arrived(self, manifest: Manifest) -> set[str]:
        """The shards of a save that have an object of the right size in the bucket."""
        sizes = self.client.list_keys(f"{manifest.checkpoint_id}/{prefix_of(manifest)}").sizes
        return {name for name, entry in manifest.shards.items() if sizes.get(name) == entry.size_bytes}

    def is_intact(self, manifest: Manifest, name: str) -> bool:
        """Whether the object is this save's shard, by its footer. This costs one or two small range reads.

        It detects another save's shard, or one that was truncated and padded. A flipped bit in the data is detected by the
        checksum that the store verified at the upload, and by every read.
        """
        entry = manifest.shards[name]
        size, key = entry.size_bytes, key_of(manifest, name)
        tail = bytearray(min(size, _TAIL_BYTES))
        try:
            self.client.read(key, size - len(tail), memoryview(tail))
            footer_bytes = footer_bytes_of(tail[-FOOTER_TAIL_BYTES:], size) or 0
            if footer_bytes > len(tail):
                tail = bytearray(footer_bytes)
                self.client.read(key, size - footer_bytes, memoryview(tail))
        except (ObjectMissing, ObjectCorrupt):
            return False
        table = decode_footer(tail[len(tail) - footer_bytes :], size)
        return table is not None and table.file_crc() == entry.crc32c

    # Committing --------------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, raw_manifest: bytes, raw_metadata: bytes) -> None:
        """Commits a save whose shards are all in the bucket. Any number of agents may call it at once.

        Each writes the same bytes: the manifest, then the mark. If the store has conditional writes, the mark replaces only
        the version that the agent has seen. Then it reads the mark back. On failure the old checkpoint stays committed.

        Raises:
            SaveAborted: a newer save of the same id is committed there.
            SaveSuperseded: the committed save is another run's, newer or not to be replaced.
            CheckpointExists: another job saved the same id at the same time, and its files have these keys.
            ObjectCorrupt: the mark that was read back differs from the written one.
        """
        mark = CommitMark(
            manifest.save_id,
            manifest.sequence,
            manifest.created_unix_s,
            crc32c(raw_manifest),
            crc32c(raw_metadata),
            bool(prefix_of(manifest)),
            manifest.lineage,
            manifest.is_slim,
        )
        key, replaced = f"{manifest.checkpoint_id}/{METADATA_NAME}", None
        if not prefix_of(manifest):
            self.check_place(manifest, self.save_of(manifest.checkpoint_id))
        # Before the mark: a mark without its manifest would be a checkpoint that cannot be read.
        self.client.put(key_of(manifest, MANIFEST_NAME), raw_manifest)
        failpoints.reach("upload.manifest-put")
        for _ in range(_COMMIT_TRIES):
            # Before the look: if another mark is written after it, the conditional write fails.
            version = self.client.version(key)
            # Right before the write: not every store has conditional writes.
            there = self.save_of(manifest.checkpoint_id)
            self.check_place(manifest, there)
            # Read back even after a success: a store may ignore the condition, or have lost the answer.
            if there is not None and there.mark == mark:
                if not self.is_described(there):  # another job put its manifest between ours and the mark
                    self.client.put(key_of(manifest, MANIFEST_NAME), raw_manifest)
                self._tidy(manifest, replaced)
                return
            replaced = there
            self.client.put_over(key, raw_metadata + mark.encode(), version)
            failpoints.reach("upload.marked")
        raise ObjectCorrupt(self.client.target.url, "commit", key, "the data read back differs from the data written")

    def check_place(self, manifest: Manifest, there: BucketSave | None) -> None:
        """Raises unless this save may replace the committed one. Two jobs may both have found the id free.

        A save replaces another run's only if that was intended. The same holds for checkpoints without a mark, of stock
        torch or of a newer format. A checkpoint of this package with a damaged mark is replaced, since an interrupted
        write leaves such a mark.
        """
        place = f"{manifest.checkpoint_id!r} in {self.client.target.url}"
        if there is None or there.save_id == manifest.save_id:
            return
        if there.mark is None:
            if there.problem in ("", OF_NEWER_FORMAT) and there.save_id != manifest.replaces_in_bucket:
                what = "was written by stock torch" if not there.problem else f"is of a newer format: {there.problem}"
                raise SaveSuperseded(f"{place} {what}. This save did not find it when it began.", _TAKEN)
            return
        if is_superseded(manifest, there):
            if there.mark.lineage != manifest.lineage:
                raise SaveSuperseded(
                    f"{place} belongs to save {there.save_id}, a newer one of another run.", _OTHER_RUN
                )
            raise SaveAborted(
                f"{place} belongs to a newer save.", "No action is needed: the newer one loads from there."
            )
        if there.mark.prefix == prefix_of(manifest):
            raise CheckpointExists(
                f"{place} belongs to save {there.save_id}, which another job made at the same time.", _TAKEN
            )
        if there.mark.lineage != manifest.lineage and there.save_id != manifest.replaces_in_bucket:
            raise SaveSuperseded(
                f"{place} belongs to save {there.save_id} of another run. This save did not find it when it began.",
                _TAKEN,
            )

    def _tidy(self, manifest: Manifest, before: BucketSave | None) -> None:
        """Removes the replaced save and the parts of interrupted uploads. Failures are logged only."""
        own = f"{manifest.checkpoint_id}/{prefix_of(manifest)}__"
        steps: list[Callable[[], object]] = [
            partial(self.client.end_unfinished, own, 0),
            partial(self.client.end_unfinished, "", _STALE_UPLOAD_S),
        ]
        if before is not None and before.mark is not None:
            steps.append(partial(self._remove_files, before))
        tidied = FanOut.run(steps, lambda step: step())
        for exc in tidied.errors.values():  # only logged: credentials that may write often may not list uploads
            log.warning("some objects of %s may stay: %s", manifest.checkpoint_id, exc)

    def mark_rejected(self, checkpoint_id: str, save_id: str, *, is_rejected: bool) -> bool:
        """Marks a committed save as rejected, or removes that mark. Returns whether the save is committed here."""
        there, key = self.save_of(checkpoint_id), f"{checkpoint_id}/{_REJECTED}{save_id}"
        if there is None or there.save_id != save_id:
            return False
        if is_rejected:
            self.client.put(key, b"rejected\n")
        else:
            self.client.delete([key])
        return True

    def remove(self, save: BucketSave) -> None:
        """Deletes a checkpoint, its mark first: after an interruption at any point the rest is not a checkpoint."""
        self.client.delete([f"{save.checkpoint_id}/{METADATA_NAME}"])
        self._remove_files(save)

    def _remove_files(self, save: BucketSave) -> None:
        """Deletes all files but the commit mark, which the caller has deleted."""
        if save.is_rejected:
            self.client.delete([f"{save.checkpoint_id}/{_REJECTED}{save.save_id}"])
        self.remove_described(f"{save.checkpoint_id}/{save.mark.prefix if save.mark else ''}", save.sizes)

    def remove_described(self, directory: str, shards: Iterable[str]) -> None:
        """Deletes the shards of a save without a mark. Its manifest, which leads to remaining shards, goes last.

        Raises:
            StoreDenied: a shard may not be deleted, as under a legal hold; the others are deleted. StoreError
        """
        client = RetryingClient(self.client)
        client.delete([f"{directory}{name}" for name in sorted(shards)])
        client.delete([f"{directory}{name}" for name in (SLIM_MANIFEST_NAME, MANIFEST_NAME)])


def prefix_of(manifest: Manifest) -> str:
    """Where a save's shards lie in the bucket, relative to its checkpoint."""
    return own_prefix(manifest.save_id) if manifest.upload is not None and manifest.upload.has_own_prefix else ""


def key_of(manifest: Manifest, name: str) -> str:
    return f"{manifest.checkpoint_id}/{prefix_of(manifest)}{name}"


def manifest_in(bucket: Bucket, save: BucketSave) -> bytes:
    """The manifest of a save in the bucket. For stock torch it is made here, with sizes and without checksums.

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


class ObjectShard(VerifiedShard):
    """Reads one shard from a bucket by verified ranges. For one thread. The bucket's client is shared and stays open."""

    def __init__(self, bucket: Bucket, key: str, expected: Expected) -> None:
        self._bucket = bucket
        self._key = key
        super().__init__(bucket.client.target.url, key, expected)

    def _fill(self, target: memoryview, offset: int) -> None:
        self._bucket.client.read(self._key, offset, target)

    def close(self) -> None:
        """Does nothing: the bucket's owner closes it."""


class UnmanagedObjectShard(ObjectShard, UnmanagedShard):
    """A shard of a checkpoint without a mark: of stock torch, or copied there from a node by hand."""

    def __init__(self, bucket: Bucket, key: str, expected: Expected, items: UncheckedItems) -> None:
        self._bucket = bucket
        self._key = key
        UnmanagedShard.__init__(self, bucket.client.target.url, key, expected, items)

    def _connect(self) -> None:
        # Without checksums of the file, only its size shows that it was replaced since the survey.
        found = self._bucket.client.size_bytes(self._key)
        if found != self._expected.size_bytes:
            raise self._corrupt(f"expected {self._expected.size_bytes} bytes, found {found}")
