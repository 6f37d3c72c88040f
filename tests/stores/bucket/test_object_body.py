"""The body of a request to S3: readable as a file, never copied, and sent within time-outs over slow links."""

import io
import os
import random
import time
from pathlib import Path
from uuid import uuid4

import pytest

from replicated_ckpt.stores.bucket_client import s3 as object_s3
from replicated_ckpt.stores.bucket_client.body import MemoryBody
from replicated_ckpt.stores.bucket_client.client import UploadSource
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.verified import Expected
from replicated_ckpt.testing.shards import table_of
from tests.buckets.faults import Fault
from tests.buckets.faulty_bucket import faulty_bucket
from tests.buckets.servers import Server

PART_BYTES = 5 << 20


@pytest.mark.parametrize("seed", range(20))
def test_a_body_reads_like_a_file(seed: int) -> None:
    """After any sequence of reads and seeks, the body returns what io.BytesIO returns."""
    chance = random.Random(seed)
    data = chance.randbytes(chance.choice([0, 1, 1000]))
    body, file = MemoryBody(data), io.BytesIO(data)
    for _ in range(50):
        size = chance.choice([None, -1, 0, 1, 300, 5000])
        assert body.read(size) == file.read(size)
        offset = chance.randint(0, len(data))
        whence, shift = chance.choice([(os.SEEK_SET, 0), (os.SEEK_CUR, file.tell()), (os.SEEK_END, len(data))])
        assert body.seek(offset - shift, whence) == file.seek(offset - shift, whence)
        assert body.tell() == file.tell()
    assert len(body) == len(data)


def test_a_body_copies_nothing() -> None:
    """A read returns a view of the memory, not a copy."""
    memory = bytearray(100)
    piece = MemoryBody(memory).read(10)
    memory[3] = 7
    assert piece[3] == 7


@pytest.mark.parametrize("size_bytes", [0, 1, 300_000])
@pytest.mark.parametrize("is_signed", [False, True])
def test_a_signed_payload_is_read_and_sent(moto: Server, size_bytes: int, *, is_signed: bool) -> None:
    """With signed payloads, the signer reads the body first. Then the body is sent from its start."""
    bucket = moto.make_bucket(f"b-{uuid4().hex[:12]}")
    options = {**moto.storage_options(), "config_kwargs": {"s3": {"payload_signing_enabled": is_signed}}}
    client = S3Client(ObjectTarget.check_supported(f"s3://{bucket}", options))
    data = os.urandom(size_bytes)
    client.put("one", data)
    found = bytearray(size_bytes)
    client.read("one", 0, memoryview(found))
    assert found == data


def test_an_upload_over_a_slow_link_is_not_aborted(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of a part may take longer than any time-out while bytes move.

    The parts have S3's smallest size, so that a busy server still answers each within the time-out.
    """
    monkeypatch.setattr(object_s3, "READ_TIMEOUT_S", 5.0)
    path = tmp_path / "shard"
    data = os.urandom(PART_BYTES * 2)
    table = table_of([data])
    path.write_bytes(data + table.encode())
    expected = Expected(table.file_bytes, table.file_crc())
    with faulty_bucket(moto) as proxy:
        bucket = proxy.server.make_bucket(f"b-{uuid4().hex[:12]}")
        client = S3Client(ObjectTarget.check_supported(f"s3://{bucket}", proxy.server.storage_options()), PART_BYTES)
        proxy.add(Fault("throttle", method="PUT", bytes_per_s=1.6e6))
        start_s = time.monotonic()
        with UploadSource(os.open(path, os.O_RDONLY), "node", "shard", expected) as source:
            client.put_shard("shard", source, lambda size_bytes: None)
        assert time.monotonic() - start_s > 6.0
        assert client.size_bytes("shard") == table.file_bytes
