"""Answers of S3 stores that are easily misread: refusals, redirects, archived and removed objects."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.config import Retention
from replicated_ckpt.core.commit_mark import CommitMark
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, UploadEntry
from replicated_ckpt.core.upkeep.policy import Policy
from replicated_ckpt.core.upkeep.repair_plan import Problem
from replicated_ckpt.errors import StoreDenied, StoreError, StoreUnavailable
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.uploads.bucket_retention import retire_in_bucket
from replicated_ckpt.stores.bucket.bucket import Bucket, key_of
from replicated_ckpt.stores.bucket.bucket_removal import remove_superseded
from replicated_ckpt.stores.bucket.inspection import BucketInspector
from replicated_ckpt.stores.bucket_client import fsspec as fsspec_client
from replicated_ckpt.stores.bucket_client.client import ARCHIVED, PART_BYTES, Listing
from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import METADATA, checkpointed, shard
from tests.buckets.faults import Fault
from tests.buckets.faulty_bucket import FaultyBucket, faulty_bucket
from tests.buckets.servers import Server
from tests.stores.bucket.test_object_clients import s3_target, upload_shards


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultyBucket]:
    with faulty_bucket(moto) as faulty:
        yield faulty


@pytest.fixture
def client(proxy: FaultyBucket) -> S3Client:
    return S3Client(s3_target(proxy.server))


HOLD = Fault("status", method="DELETE", key=f"step-1/{shard(0)}", status=403, code="AccessDenied")


def overwritten(client: S3Client, proxy: FaultyBucket, tmp_path: Path, trouble: Fault) -> Manifest:
    """Commits a save over another one, with the fault `trouble`. Leaves an unfinished upload below its key. Returns the
    new manifest.
    """
    bucket = Bucket(client)
    for sequence in (1, 2):
        store = LocalStore(tmp_path / f"node-{sequence}")
        manifest = checkpointed([store], sequence, {shard(0): (0,)}, checkpoint_id="step-1", copies=1)
        upload = UploadEntry("s3://y", sequence == 2, len(METADATA), crc32c(METADATA))
        manifest = replace(manifest, upload=upload)
        upload_shards(bucket, (store, manifest), tmp_path)
        if sequence == 2:
            client.begin(key_of(manifest, shard(0)))
            proxy.add(trouble)
        bucket.commit(manifest, manifest.encode(), METADATA)
    return manifest


def committed(client: S3Client, tmp_path: Path, sequence: int, checkpoint_id: str = "") -> Manifest:
    store = LocalStore(tmp_path / f"node-{sequence}")
    manifest = checkpointed(
        [store], sequence, {shard(0): (0,)}, checkpoint_id=checkpoint_id or f"step-{sequence}", copies=1
    )
    upload_shards(Bucket(client), (store, manifest), tmp_path)
    Bucket(client).commit(manifest, manifest.encode(), METADATA)
    return manifest


@pytest.mark.parametrize("key", ["step-412/.metadata", "step-501/.metadata"])
def test_a_key_is_no_status_of_an_answer(client: S3Client, proxy: FaultyBucket, key: str) -> None:
    """The error of a broken connection contains a URL with "412" or "501". The client does not repeat the conditional
    write without its condition.
    """
    client.put(key, b"a newer save")
    proxy.add(Fault("reset", method="PUT", times=1))
    with pytest.raises(StoreUnavailable):
        client.put_over(key, b"an older one", "")
    assert client.size_bytes(key) == len(b"a newer save")


def test_a_store_that_refuses_checksums_gets_small_objects_without(client: S3Client, proxy: FaultyBucket) -> None:
    """After a refusal, small objects are put without checksums. If that fails, too, the next put sends checksums again."""
    refuses = Fault("status", method="PUT", status=400, code="InvalidArgument", times=2)
    proxy.add(refuses)
    with pytest.raises(StoreError, match="InvalidArgument"):
        client.put("a", b"abc")
    assert client.checksum_of(0)
    proxy.add(replace(refuses, times=1))
    client.put("a", b"abc")
    assert client.size_bytes("a") == 3
    assert not client.checksum_of(0)


def test_a_redirect_is_an_error_that_says_where_to(client: S3Client, proxy: FaultyBucket) -> None:
    """A redirect raises StoreDenied after one request, and the error names `endpoint_url`. botocore by itself would
    recurse.
    """
    proxy.add(Fault("status", status=301, code="MovedPermanently"))
    with pytest.raises(StoreDenied, match=r"redirects to elsewhere.*endpoint_url"):
        client.list_keys("")
    assert len(proxy.requests("GET") + proxy.requests("HEAD")) == 1


def test_parts_that_are_refused_at_the_end_are_sent_anew(
    client: S3Client, proxy: FaultyBucket, moto: Server, tmp_path: Path
) -> None:
    """The server refuses to complete an upload (InvalidPart): the next try sends all parts in a new upload."""
    store = LocalStore(tmp_path / "node")
    saved = store, checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=PART_BYTES + 1)
    proxy.add(Fault("reset", method="POST", query="uploadId", times=1))
    with pytest.raises(StoreUnavailable):
        upload_shards(Bucket(client), saved, tmp_path)
    (upload,) = moto.client().list_multipart_uploads(Bucket=client.bucket)["Uploads"]
    proxy.add(Fault("status", method="POST", query=upload["UploadId"], status=400, code="InvalidPart"))
    with pytest.raises(StoreError, match="InvalidPart"):
        upload_shards(Bucket(client), saved, tmp_path)
    upload_shards(Bucket(client), saved, tmp_path)
    assert Bucket(client).is_intact(saved[1], shard(0))


def test_an_archived_checkpoint_hides_no_other(client: S3Client, proxy: FaultyBucket, tmp_path: Path) -> None:
    """A checkpoint in archival storage is listed with the reason why it cannot be read. `verify` reports it, and others
    are found.
    """
    for sequence in (1, 2):
        committed(client, tmp_path, sequence)
    proxy.add(Fault("status", method="GET", key=f"step-1/{METADATA_NAME}", status=403, code=ARCHIVED))
    found = {save.checkpoint_id: save for save in Bucket(client).saves()}
    assert found["step-2"].mark is not None
    assert ARCHIVED in found["step-1"].problem
    assert [finding.problem for finding in BucketInspector(Bucket(client)).inspect("step-1")] == [Problem.CORRUPT]


def test_a_damaged_mark_is_found(client: S3Client, tmp_path: Path) -> None:
    """A checkpoint with a damaged commit mark is reported, not treated as stock torch's."""
    committed(client, tmp_path, 1)
    size = client.size_bytes(f"step-1/{METADATA_NAME}")
    client.put(f"step-1/{METADATA_NAME}", bytes(size))
    inspector = BucketInspector(Bucket(client))
    (finding,) = inspector.inspect()
    assert (finding.name, finding.found) == (METADATA_NAME, "its commit mark is damaged")
    assert inspector.unchecked == []


def test_a_checkpoint_removed_during_a_listing_hides_no_other(
    client: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention removes a checkpoint between its listing and the read of its mark: the others are found."""

    def list_keys(directory: str) -> Listing:
        listing = list_really(directory)
        if directory == "step-1/":
            client.delete([f"step-1/{METADATA_NAME}"])
        return listing

    for sequence in (1, 2):
        committed(client, tmp_path, sequence)
    list_really = client.list_keys
    monkeypatch.setattr(client, "list_keys", list_keys)
    assert [save.checkpoint_id for save in Bucket(client).saves()] == ["step-2"]


@pytest.mark.parametrize("metadata", [METADATA[:-200], METADATA * 2], ids=["shorter", "longer"])
def test_a_checkpoint_overwritten_during_a_listing_is_found_and_hides_no_other(
    client: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bytes
) -> None:
    """An overwrite changes the size of `.metadata` between its listing and the read of its mark: both checkpoints are
    found.
    """
    marks: dict[str, CommitMark] = {}

    def list_keys(directory: str) -> Listing:
        listing = list_really(directory)
        if directory in marks:
            client.put(f"{directory}{METADATA_NAME}", metadata + marks.pop(directory).encode())
        return listing

    for sequence in (1, 2):
        committed(client, tmp_path, sequence)
    before = Bucket(client).save_of("step-1")
    assert before is not None
    assert before.mark is not None
    marks["step-1/"] = before.mark
    list_really = client.list_keys
    monkeypatch.setattr(client, "list_keys", list_keys)
    found = {save.checkpoint_id: (save.problem, save.metadata_bytes) for save in Bucket(client).saves()}
    assert found == {"step-1": ("", len(metadata)), "step-2": ("", len(METADATA))}


def test_a_removal_retries_a_busy_store(client: S3Client, proxy: FaultyBucket, tmp_path: Path) -> None:
    """A removal retries a throttled delete. Otherwise shards would stay without a mark."""
    committed(client, tmp_path, 1)
    (there,) = Bucket(client).saves()
    proxy.add(Fault("status", method="DELETE", key=shard(0), times=1))
    Bucket(client).remove(there)
    assert Bucket(client).is_empty("step-1")


@pytest.mark.parametrize(
    "trouble",
    [
        Fault("status", method="GET", query="uploads", status=403, code="AccessDenied"),
        Fault("status", method="DELETE", query="uploadId", status=404, code="NoSuchUpload", times=1),
        Fault("status", method="DELETE", key=MANIFEST_NAME, times=1),
    ],
    ids=["no right to list uploads", "another agent aborted it", "busy"],
)
def test_a_replaced_save_is_removed_although_another_cleanup_fails(
    client: S3Client, proxy: FaultyBucket, tmp_path: Path, trouble: Fault
) -> None:
    """An overwrite removes the replaced save even if another cleanup step fails. Nothing would find its files later."""
    manifest = overwritten(client, proxy, tmp_path, trouble)
    assert set(client.list_keys("step-1/").sizes) == {METADATA_NAME}
    assert [save.save_id for save in Bucket(client).saves()] == [manifest.save_id]


def test_a_shard_that_may_not_be_deleted_is_found_again(client: S3Client, proxy: FaultyBucket, tmp_path: Path) -> None:
    """A shard of a replaced save may not be deleted: its manifest stays, and a later removal completes."""
    bucket = Bucket(client)
    manifest = overwritten(client, proxy, tmp_path, HOLD)
    (there,) = bucket.saves()
    with pytest.raises(StoreDenied):
        remove_superseded(bucket, manifest, there)
    assert set(client.list_keys("step-1/").sizes) == {METADATA_NAME, MANIFEST_NAME, shard(0)}
    proxy.clear()
    remove_superseded(bucket, manifest, there)
    assert set(client.list_keys("step-1/").sizes) == {METADATA_NAME}


def test_a_denied_delete_keeps_no_other_checkpoint(client: S3Client, proxy: FaultyBucket, tmp_path: Path) -> None:
    """One checkpoint and one shard may not be deleted: retention removes the other checkpoints, and the other shards."""
    for sequence in range(1, 6):
        newest = committed(client, tmp_path, sequence)
    client.put(f"step-4/{shard(9)}", b"a shard")
    for key in (f"step-2/{METADATA_NAME}", f"step-4/{shard(0)}"):
        proxy.add(Fault("status", method="DELETE", key=key, status=403, code="AccessDenied"))
    service = NodeService(LocalStore(tmp_path / "node"))
    service.policies.learn([Policy("", client.target.url, 9, Retention(keep_last=1))])
    retire_in_bucket(service, Bucket(client), newest)
    assert {save.checkpoint_id for save in Bucket(client).saves()} == {"step-2", "step-5"}
    assert set(client.list_keys("step-4/").sizes) == {shard(0), MANIFEST_NAME}


@pytest.mark.parametrize("scope", ["run", ""])
def test_listing_one_directory_requests_no_other(
    client: S3Client, proxy: FaultyBucket, tmp_path: Path, scope: str
) -> None:
    """Listing one directory's checkpoints sends no request for another run's."""
    for number, checkpoint_id in enumerate(("run/step-1", "other/step-1", "step-1"), 1):
        committed(client, tmp_path, number, checkpoint_id)
    asked = len(proxy.requests())
    (found,) = Bucket(client).saves(scope)
    assert found.checkpoint_id == f"{scope}/step-1".lstrip("/")
    below = [request for request in proxy.requests()[asked:] if "other/step-1" in request.key + request.query]
    assert below == []


@pytest.mark.parametrize("verb", ["cat_file", "size", "pipe_file"])
def test_a_store_that_never_answers_fsspec_is_unavailable(
    moto: Server, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A request through fsspec that hangs raises StoreUnavailable after a time-out. gcsfs by itself waits for ever."""

    async def hang(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    client = FsspecClient(s3_target(moto))
    monkeypatch.setattr(fsspec_client, "LIST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(client._fs, f"_{verb}", hang)
    asks: dict[str, Callable[[], object]] = {
        "cat_file": lambda: client.read("a", 0, memoryview(bytearray(4))),
        "size": lambda: client.size_bytes("a"),
        "pipe_file": lambda: client.put("a", b"abc"),
    }
    with pytest.raises(StoreUnavailable):
        asks[verb]()
