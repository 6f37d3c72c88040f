"""A bucket of checkpoints over every client. The contract of clients is in test_contracts.py."""

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from replicated_ckpt.core.commit_mark import MARK_BYTES, CommitMark, decode_mark
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import Manifest, UploadEntry
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    SaveAborted,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.bucket.bucket import Bucket, ObjectShard, UnmanagedObjectShard, key_of, manifest_in
from replicated_ckpt.stores.bucket_client.client import PART_BYTES, Listing, ObjectClient, UploadSource
from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.durable import write_all
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unmanaged import UncheckedItems
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.stores.verified import Expected
from replicated_ckpt.testing.shards import table_of
from tests.agent.checkpoints import METADATA, checkpointed, shard
from tests.buckets.faults import Fault, Kind
from tests.buckets.faulty_bucket import faulty_bucket
from tests.buckets.servers import Server
from tests.buckets.weak import weak_server
from tests.stopwatch import Stopwatch

MakeClient = Callable[[ObjectTarget], ObjectClient]


def free(size_bytes: int) -> None:
    """A pace that never waits."""


def s3_target(server: Server, **options: Any) -> ObjectTarget:
    bucket = server.make_bucket(f"b-{uuid4().hex[:12]}")
    return ObjectTarget.check_supported(f"s3://{bucket}/runs/one", {**server.storage_options(), **options})


@pytest.fixture(params=["s3", "s3fs", "file", "memory"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectClient:
    if request.param in ("s3", "s3fs"):
        target = s3_target(request.getfixturevalue("moto"))
        return S3Client(target) if request.param == "s3" else FsspecClient(target)
    url = f"file://{tmp_path}/bucket" if request.param == "file" else f"memory://{uuid4().hex}/one"
    return open_client(ObjectTarget.check_supported(url, None))


def source_of(store: LocalStore, manifest: Manifest, name: str, tmp_path: Path) -> UploadSource:
    entry = manifest.shards[name]
    with open_directory(store.root, manifest.checkpoint_id) as directory:
        expected = Expected(entry.size_bytes, entry.crc32c)
        begun = UploadBook(tmp_path).begun(manifest.save_id, name)  # read from disk, as after a restart
        return UploadSource(directory.open(name), "node", name, expected, begun)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LocalStore, Manifest]:
    store = LocalStore(tmp_path / "node")
    return store, checkpointed([store], 1, {shard(0): (0,), shard(1): (0,)}, copies=1)


def upload_shards(bucket: Bucket, saved: tuple[LocalStore, Manifest], tmp_path: Path, *names: str) -> None:
    store, manifest = saved
    for name in names or sorted(manifest.shards):
        with source_of(store, manifest, name, tmp_path) as source:
            bucket.put_shard(manifest, name, source, free)


def test_shards_arrive_as_they_were_saved(
    client: ObjectClient, saved: tuple[LocalStore, Manifest], tmp_path: Path
) -> None:
    """Shards are verified during the upload, found again, committed once all are there, and read by verified ranges."""
    store, manifest = saved
    bucket = Bucket(client)
    assert bucket.is_empty("step-1")
    upload_shards(bucket, saved, tmp_path, shard(0))
    assert bucket.find_arrived(manifest) == {shard(0)}
    assert bucket.saves() == ()
    upload_shards(bucket, saved, tmp_path)
    assert bucket.find_arrived(manifest) == set(manifest.shards)
    assert all(bucket.is_intact(manifest, name) for name in manifest.shards)
    raw = manifest.encode()
    bucket.commit(manifest, raw, METADATA)
    (found,) = bucket.saves()
    assert found.save_id == manifest.save_id
    assert found.sizes == {name: entry.size_bytes for name, entry in manifest.shards.items()}
    assert manifest_in(bucket, found) == raw
    assert bucket.small("step-1/.metadata", found.metadata_bytes) == METADATA
    name = shard(1)
    remote = ObjectShard(
        bucket, key_of(manifest, name), Expected(found.sizes[name], manifest.shards[name].crc32c)
    ).open()
    with (store.root / "step-1" / name).open("rb") as file:
        file.seek(300_000)
        assert remote.read(300_000, 200_000) == file.read(200_000)
    assert unmanaged(client, key_of(manifest, name), found.sizes[name]).read(5, 10)
    bucket.remove(found)
    assert bucket.is_empty("step-1")


def unmanaged(client: ObjectClient, key: str, size_bytes: int, *items: ByteRange) -> UnmanagedObjectShard:
    return UnmanagedObjectShard(Bucket(client), key, Expected(size_bytes, 0), UncheckedItems(items)).open()


def test_a_shard_without_a_mark_is_verified_by_its_footer(client: ObjectClient) -> None:
    """A shard without a commit mark, as in a user's copy of a node's files, is verified against its own footer. Without
    a footer it is read unverified.
    """
    data = random.Random(1).randbytes(700_000)
    ours, whole = bytearray(data + table_of([data]).encode()), ByteRange(0, len(data))
    client.put("ours", bytes(ours))
    read = unmanaged(client, "ours", len(ours), whole)
    assert read.read(5, len(data) - 5) == data[5:]
    ours[300_000] ^= 1
    client.put("flipped", bytes(ours))
    read = unmanaged(client, "flipped", len(ours), whole)
    with pytest.raises(ObjectCorrupt, match="expected CRC32C"):
        read.read(299_999, 2)
    assert read.read(600_000, 9) == data[600_000:600_009]
    ours[-1] ^= 1
    client.put("footer_damaged", bytes(ours))
    read = unmanaged(client, "footer_damaged", len(ours), whole)
    with pytest.raises(ObjectCorrupt, match="footer"):
        read.read(0, 9)
    client.put("stock", data)
    assert unmanaged(client, "stock", len(data), whole).read(0, len(data)) == data


def test_a_save_never_mixes_with_the_one_it_replaces(client: ObjectClient, tmp_path: Path) -> None:
    """An overwrite uploads to its own prefix, commits, and removes the old shards. The older save cannot commit
    afterwards.
    """
    store = LocalStore(tmp_path / "node")
    bucket = Bucket(client)
    manifests = []
    for number in (1, 2):
        manifest = checkpointed([store], number, {shard(0): (0,)}, copies=1)
        upload = UploadEntry("x://y", number == 2, len(METADATA), crc32c(METADATA))
        manifests.append(replace(manifest, upload=upload))
        upload_shards(bucket, (store, manifests[-1]), tmp_path)
        if number == 2:
            (found,) = bucket.saves()
            assert found.save_id == manifests[0].save_id
            assert bucket.is_intact(manifests[0], *manifests[0].shards)
        bucket.commit(manifests[-1], manifests[-1].encode(), METADATA)
    (found,) = bucket.saves()
    assert found.save_id == manifests[1].save_id
    assert bucket.is_intact(manifests[1], *manifests[1].shards)
    assert set(client.list_keys("step-1/").sizes) == {".metadata"}
    with pytest.raises(SaveAborted):
        bucket.commit(manifests[0], manifests[0].encode(), METADATA)


@pytest.mark.parametrize(("first", "refusal"), [(2, SaveAborted), (1, CheckpointExists)], ids=["older", "newer"])
def test_two_jobs_that_found_the_id_free_never_mix(
    client: ObjectClient, tmp_path: Path, first: int, refusal: type[Exception]
) -> None:
    """Of two jobs that found an id free, one commits and stays intact. The other is refused before it overwrites a
    byte.
    """
    bucket = Bucket(client)
    stores = {number: LocalStore(tmp_path / f"node{number}") for number in (1, 2)}
    saves = {}
    for number, store in stores.items():
        manifest = checkpointed([store], number, {shard(0): (0,)}, copies=1)
        saves[number] = replace(manifest, upload=UploadEntry("x://y", False, len(METADATA), crc32c(METADATA)))
    there, late = saves[first], saves[3 - first]
    upload_shards(bucket, (stores[first], there), tmp_path)
    bucket.commit(there, there.encode(), METADATA)
    with pytest.raises(refusal):
        upload_shards(bucket, (stores[3 - first], late), tmp_path)
    with pytest.raises(refusal):
        bucket.commit(late, late.encode(), METADATA)
    (found,) = bucket.saves()
    assert found.save_id == there.save_id
    assert manifest_in(bucket, found) == there.encode()
    assert bucket.is_intact(there, shard(0))


@pytest.fixture
def large(tmp_path: Path) -> tuple[LocalStore, Manifest]:
    """A committed checkpoint with a shard of several parts."""
    store = LocalStore(tmp_path / "node")
    return store, checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=PART_BYTES * 4 + 12345)


def test_a_broken_upload_goes_on_where_it_was(moto: Server, large: tuple[LocalStore, Manifest], tmp_path: Path) -> None:
    """After a failed part, another process continues the upload without sending the finished parts again."""
    with faulty_bucket(moto) as proxy:
        target = s3_target(proxy.server)
        proxy.add(Fault("status", method="PUT", key=shard(0), skip=3, times=1))
        with pytest.raises(StoreUnavailable):
            upload_shards(Bucket(S3Client(target)), large, tmp_path)
        upload_shards(Bucket(S3Client(target)), large, tmp_path)
        size = large[1].shards[shard(0)].size_bytes
        assert proxy.uploaded_bytes(shard(0)) <= size + PART_BYTES * 2


def test_unfinished_uploads_are_ended(moto: Server, large: tuple[LocalStore, Manifest], tmp_path: Path) -> None:
    """`end_unfinished` aborts uploads of shards, whose parts would be charged, but no upload of other users below the
    same prefix.
    """
    with faulty_bucket(moto) as proxy:
        client = S3Client(s3_target(proxy.server))
        theirs = client.begin("step-1/model.safetensors")
        proxy.add(Fault("status", method="PUT", key=shard(0), skip=1, times=9))
        with pytest.raises(StoreUnavailable):
            upload_shards(Bucket(client), large, tmp_path)
        assert client.end_unfinished("step-1/", 0) == 1
        assert client.end_unfinished("step-1/", 0) == 0
        listed = client.s3.list_multipart_uploads(Bucket=client.bucket)["Uploads"]
        assert theirs in [upload["UploadId"] for upload in listed]
        proxy.clear()
        upload_shards(Bucket(client), large, tmp_path)  # its record names the aborted upload


@pytest.mark.parametrize(("code", "status"), [("NotImplemented", 501), ("InvalidArgument", 400)])
def test_a_store_that_refuses_checksums_gets_none(
    moto: Server, large: tuple[LocalStore, Manifest], tmp_path: Path, code: str, status: int
) -> None:
    """After a store refuses checksums, uploads continue without them. After any other error, the next upload sends them
    again.
    """
    with faulty_bucket(moto) as proxy:
        client = S3Client(s3_target(proxy.server))
        begins = Fault("status", method="POST", key=shard(0), query="uploads", times=1)
        proxy.add(replace(begins, status=400, code="BadRequest"))
        with pytest.raises(StoreError, match="BadRequest"):
            upload_shards(Bucket(client), large, tmp_path)
        assert client.checksum_of(0)
        proxy.add(replace(begins, status=status, code=code))
        upload_shards(Bucket(client), large, tmp_path)
        assert not client.checksum_of(0)
        assert Bucket(client).is_intact(large[1], shard(0))


def test_an_upload_begun_without_checksums_goes_on_without(large: tuple[LocalStore, Manifest], tmp_path: Path) -> None:
    """Another process continues an upload that was begun without checksums, and sends no checksums either."""
    with weak_server(refuses_checksums=True) as store, faulty_bucket(store) as proxy:
        target = s3_target(proxy.server)
        proxy.add(Fault("reset", method="PUT", key=shard(0), skip=1, times=1))
        for _ in range(2):
            with contextlib.suppress(StoreUnavailable):
                upload_shards(Bucket(S3Client(target)), large, tmp_path)
        assert Bucket(S3Client(target)).is_intact(large[1], shard(0))


@pytest.mark.parametrize("kind", ["reset", "lost_answer"])
def test_a_failed_part_is_an_error_and_the_next_try_completes(
    moto: Server, large: tuple[LocalStore, Manifest], tmp_path: Path, kind: Kind
) -> None:
    """A part that is lost, or whose answer is lost, raises an error. The next try completes the shard."""
    with faulty_bucket(moto) as proxy:
        bucket = Bucket(S3Client(s3_target(proxy.server)))
        proxy.add(Fault(kind, method="PUT", key=shard(0), skip=1, times=1, at=1000))
        with pytest.raises(StoreError):
            upload_shards(bucket, large, tmp_path)
        assert bucket.find_arrived(large[1]) == set()
        upload_shards(bucket, large, tmp_path)
        assert bucket.is_intact(large[1], shard(0))


def test_refusals_are_distinguished(moto: Server, tmp_path: Path) -> None:
    """A wrong bucket raises StoreDenied, an unreachable server StoreUnavailable. No message contains the secret."""
    options = moto.storage_options()
    with pytest.raises(StoreDenied, match="NoSuchBucket"):
        Bucket(S3Client(ObjectTarget.check_supported("s3://nobody-has-this/x", options))).is_empty("step-1")
    with faulty_bucket(moto) as proxy:
        target = s3_target(proxy.server)
        proxy.away()
        with pytest.raises(StoreUnavailable) as raised:
            S3Client(target).list_keys("")
        assert "testsecret" not in str(raised.value)


def test_an_invalid_endpoint_names_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint for an invalid endpoint from the environment names the variables."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(ConfigInvalid, match=r"nonsense\. Hint: Correct storage_options, or the AWS_\* variables\."):
        S3Client(ObjectTarget.check_supported("s3://bucket/x", None))


def test_a_target_shows_no_secret() -> None:
    """Neither the target's repr nor a scrubbed message contains keys."""
    target = ObjectTarget.check_supported("s3://bucket/x", {"key": "AKIA1234", "secret": "very-secret"})
    assert "secret" not in repr(target)
    assert target.scrub("cannot sign with very-secret of AKIA1234") == "cannot sign with *** of ***"


@pytest.mark.parametrize(
    "url",
    ["", "bucket", "s3://", "s3://key:secret@bucket/x", "s3://bucket/x?token=1", "s3://bucket/x\n", " s3://bucket", 7],
)
def test_an_invalid_url_is_refused(url: Any) -> None:
    """A value that is no URL of a bucket raises ConfigInvalid."""
    with pytest.raises(ConfigInvalid):
        ObjectTarget.check_supported(url, None)


def test_a_damaged_mark_does_not_decode() -> None:
    """A mark with any flipped bit, or with an invalid time, does not decode."""
    mark = CommitMark("0" * 31 + "1", 7, 1.5, 1, 2, has_own_prefix=True)
    raw = mark.encode()
    assert decode_mark(raw) == mark
    assert len(raw) == MARK_BYTES
    for position in range(len(raw)):
        bad = bytearray(raw)
        bad[position] ^= 1 << (position % 8)
        assert decode_mark(bad) is None
    assert decode_mark(os.urandom(MARK_BYTES)) is None
    for created in (-1e300, -1.0, float("nan"), float("inf")):  # times that cannot be shown or compared
        assert decode_mark(replace(mark, created_unix_s=created).encode()) is None


def test_a_read_outlives_a_moment_of_bucket_faults(moto: Server, stopwatch: Stopwatch) -> None:
    """Reads retry temporary faults. A lasting fault raises after the time-out, and a denial at once."""
    with faulty_bucket(moto) as proxy:
        client = RetryingClient(S3Client(s3_target(proxy.server)), within_s=3)
        client.put("a", b"0123456789")
        for kind in ("status", "reset", "short_answer", "cut_answer"):
            piece, fault = bytearray(10), proxy.add(Fault(kind, method="GET", times=1, at=5))
            client.read("a", 0, memoryview(piece))
            assert (bytes(piece), fault.fired) == (b"0123456789", 1), kind
        proxy.add(Fault("status"))
        began, started = time.monotonic(), stopwatch.now()
        with pytest.raises(StoreUnavailable):
            client.list_keys("")
        assert time.monotonic() - began > 1
        assert stopwatch.now() - started < 10
    options = moto.storage_options()
    with pytest.raises(StoreDenied):
        RetryingClient(S3Client(ObjectTarget.check_supported("s3://nobody-has-this/x", options))).list_keys("")


def test_fsspecs_configuration_holds_where_no_option_is_given(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and endpoint come from FSSPEC_S3_*, as with s3fs. An option takes precedence."""
    bucket = moto.make_bucket(f"b-{uuid4().hex[:12]}")
    monkeypatch.setenv("FSSPEC_S3_KEY", moto.key)
    monkeypatch.setenv("FSSPEC_S3_SECRET", moto.secret)
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", moto.endpoint_url)
    client = open_client(ObjectTarget.check_supported(f"s3://{bucket}/x", None))
    assert isinstance(client, S3Client)
    client.put("a", b"one")
    assert client.list_keys("").sizes == {"a": 3}
    elsewhere = open_client(ObjectTarget.check_supported(f"s3://{bucket}/x", {"endpoint_url": "http://127.0.0.1:9"}))
    with pytest.raises(StoreUnavailable):
        elsewhere.list_keys("")


def test_a_failed_write_to_a_file_system_keeps_the_previous_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared disk fills in the middle of a write: the previous object stays intact. A partial file of a killed
    agent is not listed.
    """
    client = open_client(ObjectTarget.check_supported(f"file://{tmp_path}/bucket", None))
    client.put("last/.metadata", b"before")

    def write_half(fd: int, data: bytes) -> None:
        write_all(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("replicated_ckpt.stores.bucket_client.directory.write_all", write_half)
    with pytest.raises(StoreError, match="No space left"):
        client.put("last/.metadata", b"after it")
    assert client.list_keys("last/").sizes == {".metadata": 6}
    monkeypatch.undo()
    client.put("last/.metadata", b"after it")
    assert (tmp_path / "bucket" / "last" / ".metadata").read_bytes() == b"after it"
    (tmp_path / "bucket" / "last" / ".metadata.5.part").write_bytes(b"of an agent that was killed")
    client.delete(["last/.metadata"])
    assert client.list_keys("last/").sizes == {}


def test_no_link_in_a_bucket_is_followed(tmp_path: Path) -> None:
    """A `file://` bucket contains symbolic links to private files: the client lists, reads, writes and removes nothing
    outside.
    """
    bucket, private = tmp_path / "bucket", tmp_path / "private"
    for place in (bucket / "old", private):
        place.mkdir(parents=True)
    (private / "file").write_bytes(b"private")
    (tmp_path / "mounted").symlink_to(bucket)  # the path of the bucket itself may be a link
    client = open_client(ObjectTarget.check_supported(f"file://{tmp_path}/mounted", None))
    (bucket / "linked").symlink_to(private)
    (bucket / "old" / "inner").symlink_to(private)
    (bucket / "old" / "file").symlink_to(private / "file")
    os.mkfifo(bucket / "old" / "pipe")
    assert client.list_keys("") == Listing({}, ("old",))
    assert client.list_keys("old/") == client.list_keys("linked/") == client.list_keys("old/inner/") == Listing()
    for key in ("linked/file", "old/inner/file", "old/file", "old/pipe", "linked"):
        with pytest.raises(ObjectMissing):
            client.read(key, 0, memoryview(bytearray(7)))
        with pytest.raises(ObjectMissing):
            client.size_bytes(key)
    for key in ("linked/new", "old/inner/file"):
        with pytest.raises(StoreError, match="links in a bucket are not followed"):
            client.put(key, b"written")
        client.delete([key])
    client.put("old/file", b"an object in the link's place")
    client.delete(["linked/file", "old/inner/file", "old/file", "linked"])
    assert [(path.name, path.read_bytes()) for path in private.iterdir()] == [("file", b"private")]
    assert client.list_keys("old/") == Listing()
    assert not (bucket / "linked").is_symlink()  # a link with an object's name is removed, but not its target


def test_no_empty_directory_stays_in_a_bucket(tmp_path: Path) -> None:
    """A `file://` bucket keeps no empty directories. A concurrent write to a removed directory succeeds, and other
    objects stay.
    """
    client = open_client(ObjectTarget.check_supported(f"file://{tmp_path}/bucket", None))
    keys = [f"run/step-{number}/{name}" for number in range(2) for name in (".metadata", "x/__0_0.distcp")]
    for key in keys:
        client.put(key, b"x")
    client.delete(keys[:2])
    assert client.list_keys("run/").directories == ("step-1",)
    client.delete(keys)
    assert list((tmp_path / "bucket").iterdir()) == []

    def come_and_go(number: int) -> None:
        for _ in range(100):
            client.put(f"run/step-1/{number}", b"x")
            client.delete([f"run/step-1/{number}"])

    FanOut.run(range(4), come_and_go).raise_first()
    assert list((tmp_path / "bucket").iterdir()) == []


def test_a_checkpoint_whose_id_looks_like_a_saves_is_listed(tmp_path: Path) -> None:
    """A directory named by 32 hexadecimal digits, like many run ids, is not taken for a save's prefix: its checkpoints
    are listed.
    """
    store, run = LocalStore(tmp_path / "node"), uuid4().hex
    url = f"file://{tmp_path}/bucket"
    manifest = checkpointed([store], 1, {shard(0): (0,)}, copies=1, checkpoint_id=f"{run}/step-1", url=url)
    bucket = Bucket(open_client(ObjectTarget.check_supported(url, None)))
    upload_shards(bucket, (store, manifest), tmp_path)
    bucket.commit(manifest, manifest.encode(), METADATA)
    for scope in (None, run):
        assert [save.checkpoint_id for save in bucket.saves(scope)] == [f"{run}/step-1"]


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_bucket_by_a_relative_path_is_refused(scheme: str) -> None:
    """A relative `file://` path is refused: ranks and agents would resolve it against different directories."""
    with pytest.raises(ConfigInvalid, match="is a relative path") as raised:
        ObjectTarget.check_supported(f"{scheme}://shared/bucket", None)
    assert f"{scheme}:///share" in raised.value.hint
