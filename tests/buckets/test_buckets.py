"""The servers work with boto3 and s3fs, and the weak store has its documented weaknesses."""

import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.buckets.clients import BODY, BUCKET, ELSEWHERE, KEY, breaks, filesystem, get, put
from tests.buckets.faulty_bucket import Fault, faulty_bucket
from tests.buckets.servers import Server, Unavailable, radosgw_server
from tests.buckets.weak import WeakStore


def test_a_weak_store_keeps_half_a_put(weak_store: WeakStore) -> None:
    """An upload that was cut off becomes a shorter object."""
    weak_store.make_bucket(BUCKET)
    with faulty_bucket(weak_store) as faulty:
        faulty.add(Fault("reset", method="PUT", at=1000, times=1))
        assert breaks(put, faulty.server)
    while KEY not in weak_store.objects_by_bucket[BUCKET]:
        time.sleep(0.01)
    assert get(weak_store) == BODY[:1000]
    assert weak_store.client().head_object(Bucket=BUCKET, Key=KEY)["ContentLength"] == 1000


def test_a_weak_store_ignores_conditions(weak_store: WeakStore) -> None:
    """Every conditional PUT of a key succeeds."""
    weak_store.make_bucket(BUCKET)
    put(weak_store, b"first", IfNoneMatch="*")
    put(weak_store, b"second", IfNoneMatch="*")
    put(weak_store, b"third", IfMatch='"other"')
    assert get(weak_store) == b"third"


def test_a_weak_store_lists_reads_and_deletes(weak_store: WeakStore) -> None:
    """Pages, prefixes, delimiters, ranges and deletions are those of S3."""
    weak_store.make_bucket(BUCKET)
    client = weak_store.client()
    keys = [f"a/{number:02} <&>ü" for number in range(7)]
    for key in [*keys, "b/1"]:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")
    pages = list(
        client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="a/", PaginationConfig={"PageSize": 3})
    )
    assert [[one["Key"] for one in page["Contents"]] for page in pages] == [keys[:3], keys[3:6], keys[6:]]
    folders = client.list_objects_v2(Bucket=BUCKET, Delimiter="/")["CommonPrefixes"]
    assert [one["Prefix"] for one in folders] == ["a/", "b/"]
    ranges = {"bytes=2-4": b"234", "bytes=7-99": b"789", "bytes=-3": b"789"}
    for asked, expected in ranges.items():
        answer = client.get_object(Bucket=BUCKET, Key="b/1", Range=asked)
        assert (answer["Body"].read(), answer["ContentRange"][-3:]) == (expected, "/10")
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in keys[1:]]})
    client.delete_object(Bucket=BUCKET, Key="b/1")
    assert list(weak_store.objects_by_bucket[BUCKET]) == keys[:1]
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket=BUCKET, Key="b/1")


def exercise(server: Server) -> None:
    """Completes, lists and aborts multipart uploads with boto3, and writes, reads, lists and removes objects with s3fs."""
    server.make_bucket(BUCKET)
    client = server.client()
    part_bytes = 5 << 20
    upload = {
        "Bucket": BUCKET,
        "Key": KEY,
        "UploadId": client.create_multipart_upload(Bucket=BUCKET, Key=KEY)["UploadId"],
    }
    etags = [client.upload_part(PartNumber=n, Body=b"%d" % n * part_bytes, **upload)["ETag"] for n in (1, 2)]
    assert [part["Size"] for part in client.list_parts(**upload)["Parts"]] == [part_bytes] * 2
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)
    assert (
        client.get_object(Bucket=BUCKET, Key=KEY, Range=f"bytes={part_bytes - 1}-{part_bytes}")["Body"].read() == b"12"
    )
    orphan = client.create_multipart_upload(Bucket=BUCKET, Key=ELSEWHERE)["UploadId"]
    found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=ELSEWHERE)["Uploads"]
    assert [one["UploadId"] for one in found] == [orphan]
    client.abort_multipart_upload(Bucket=BUCKET, Key=ELSEWHERE, UploadId=orphan)
    assert not client.list_multipart_uploads(Bucket=BUCKET, Prefix=ELSEWHERE).get("Uploads")

    files = filesystem(server)
    assert files.info(f"{BUCKET}/{KEY}")["size"] == 2 * part_bytes
    files.pipe_file(f"{BUCKET}/{ELSEWHERE}", BODY * 48, chunksize=part_bytes)  # a multipart upload
    assert files.cat_file(f"{BUCKET}/{ELSEWHERE}", start=1, end=300) == (BODY * 2)[1:300]
    assert sorted(files.find(f"{BUCKET}/step-1")) == [f"{BUCKET}/{ELSEWHERE}", f"{BUCKET}/{KEY}"]
    files.rm(f"{BUCKET}/step-1", recursive=True)
    assert not files.exists(f"{BUCKET}/{KEY}")


def test_the_weak_store_serves_boto3_and_s3fs(weak_store: WeakStore) -> None:
    exercise(weak_store)


def test_moto_serves_boto3_and_s3fs(moto: Server) -> None:
    exercise(moto)


def test_radosgw_serves_boto3_and_s3fs_through_the_proxy(radosgw: Server) -> None:
    """The real server accepts requests that were signed for the proxy, keeps a key's first object, and detects a
    flipped bit.
    """
    with faulty_bucket(radosgw) as faulty:
        exercise(faulty.server)
        put(faulty.server, b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            put(faulty.server, b"second", IfNoneMatch="*")
        faulty.add(Fault("flip_request", method="PUT", times=1))
        with pytest.raises(ClientError, match="XAmzContentSHA256Mismatch"):
            put(faulty.server, b"second")
        faulty.add(Fault("reset", method="PUT", at=1000, times=1))
        assert breaks(put, faulty.server)
        assert get(radosgw) == b"first"


def test_a_server_that_cannot_run_has_a_reason(tmp_path: Path) -> None:
    """There is no chroot, and none can be created: the error has the reason, with which the fixture skips its tests."""
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match=r"no radosgw: .+"), radosgw_server(tmp_path / "file" / "radosgw"):
        pass
