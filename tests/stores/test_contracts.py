"""Every store of this package, and the in-memory reference, passes the contracts of `replicated_ckpt.testing`."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from replicated_ckpt.stores.bucket.bucket import Bucket, ObjectShard
from replicated_ckpt.stores.bucket_client.client import Listing, ObjectClient
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink, ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.copy import PeerShard, PeerSink
from replicated_ckpt.stores.tee import Sink
from replicated_ckpt.stores.verified import Expected, VerifiedShard
from replicated_ckpt.testing import (
    MemoryClient,
    MemoryShard,
    MemorySink,
    ObjectClientContract,
    RawObjects,
    ShardContract,
    SinkContract,
)
from replicated_ckpt.testing.shards import ReadBack
from tests.agent.agents import RunningAgent, running_agent
from tests.agent.checkpoints import checkpointed
from tests.buckets.memory_bucket import Object
from tests.buckets.servers import Server
from tests.buckets.weak import WeakStore

SHARD = "__0_0.distcp"
MEMORY = ObjectTarget.check_supported("memory://reference/one", None)


class Files:
    """The objects of an fsspec file system below a path, read and written without the client."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path

    def __getitem__(self, key: str) -> bytes:
        try:
            data: bytes = self._files.cat_file(f"{self._path}/{key}")
        except FileNotFoundError as exc:
            raise KeyError(key) from exc
        return data

    def __setitem__(self, key: str, data: bytes) -> None:
        self._files.makedirs(f"{self._path}/{key}".rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(f"{self._path}/{key}", data)


class Objects:
    """The objects of an S3 bucket, read and written with boto3."""

    def __init__(self, server: Server, bucket: str) -> None:
        self._client, self._bucket = server.client(), bucket

    def __getitem__(self, key: str) -> bytes:
        try:
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=f"runs/one/{key}")["Body"].read()
        except self._client.exceptions.NoSuchKey as exc:
            raise KeyError(key) from exc
        return data

    def __setitem__(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"runs/one/{key}", Body=data)


class TestMemoryClient(ObjectClientContract):
    @pytest.fixture
    def client(self) -> MemoryClient:
        return MemoryClient(MEMORY)

    @pytest.fixture
    def raw(self, client: ObjectClient) -> RawObjects:
        assert isinstance(client, MemoryClient)
        return client.objects


class TestRetryingClient(ObjectClientContract):
    """A wrapper passes the contract of clients, too."""

    @pytest.fixture
    def memory(self) -> MemoryClient:
        return MemoryClient(MEMORY)

    @pytest.fixture
    def client(self, memory: MemoryClient) -> ObjectClient:
        return RetryingClient(memory)

    @pytest.fixture
    def raw(self, memory: MemoryClient) -> RawObjects:
        return memory.objects


class TestDirectoryClient(ObjectClientContract):
    has_conditions = False

    @pytest.fixture
    def client(self, tmp_path: Path) -> ObjectClient:
        return DirectoryClient(ObjectTarget.check_supported(f"file://{tmp_path}/bucket", None))

    @pytest.fixture
    def raw(self, tmp_path: Path) -> RawObjects:
        return Files(fsspec.filesystem("file"), f"{tmp_path}/bucket")


class TestFsspecMemoryClient(ObjectClientContract):
    has_conditions = False
    is_paced = False

    @pytest.fixture
    def client(self) -> ObjectClient:
        return FsspecClient(ObjectTarget.check_supported(f"memory://{uuid4().hex}/one", None))

    @pytest.fixture
    def raw(self, client: ObjectClient) -> RawObjects:
        return Files(fsspec.filesystem("memory"), client.target.url.removeprefix("memory:/"))


class TestS3Client(ObjectClientContract):
    listed_objects = 30  # each takes moto milliseconds; the weak store below tests pages

    @pytest.fixture
    def bucket(self, moto: Server) -> str:
        return moto.make_bucket(f"b-{uuid4().hex[:12]}")

    @pytest.fixture
    def client(self, moto: Server, bucket: str) -> ObjectClient:
        return S3Client(ObjectTarget.check_supported(f"s3://{bucket}/runs/one", moto.storage_options()))

    @pytest.fixture
    def raw(self, moto: Server, bucket: str) -> RawObjects:
        return Objects(moto, bucket)


class TestS3fsClient(TestS3Client):
    has_conditions = False

    @pytest.fixture
    def client(self, moto: Server, bucket: str) -> ObjectClient:
        return FsspecClient(ObjectTarget.check_supported(f"s3://{bucket}/runs/one", moto.storage_options()))


class WeakObjects:
    """The objects of a weak store, without HTTP."""

    def __init__(self, store: WeakStore) -> None:
        self._objects = store.objects_by_bucket["weak"]

    def __getitem__(self, key: str) -> bytes:
        return self._objects[f"runs/one/{key}"].body

    def __setitem__(self, key: str, data: bytes) -> None:
        self._objects[f"runs/one/{key}"] = Object.of(data)


class TestS3ClientOfAWeakStore(ObjectClientContract):
    """A store without conditions and copies, which lists 1,000 keys per page."""

    has_conditions = False
    has_copies = False

    @pytest.fixture
    def client(self, weak_store: WeakStore) -> ObjectClient:
        bucket = weak_store.make_bucket("weak")
        return S3Client(ObjectTarget.check_supported(f"s3://{bucket}/runs/one", weak_store.storage_options()))

    @pytest.fixture
    def raw(self, client: ObjectClient, weak_store: WeakStore) -> RawObjects:
        del client  # the fixture has made the bucket
        return WeakObjects(weak_store)


class TestMemorySink(SinkContract):
    @pytest.fixture
    def sink(self) -> MemorySink:
        return MemorySink()

    @pytest.fixture
    def stored(self, sink: Sink) -> ReadBack:
        assert isinstance(sink, MemorySink)
        return lambda: sink.data


def read_if_there(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


class TestFileSink(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> Sink:
        return FileSink.create(tmp_path / SHARD)

    @pytest.fixture
    def stored(self, tmp_path: Path) -> ReadBack:
        return lambda: read_if_there(tmp_path / SHARD)


class TestDirectFileSink(TestFileSink):
    """Writes with O_DIRECT if the file system allows it."""

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Sink:
        return FileSink.create(tmp_path / SHARD, "on")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """The agent of another node with one checkpoint."""
    root = tmp_path_factory.mktemp("node")
    checkpointed([LocalStore(root)], 1, {SHARD: (0,)}, copies=1)
    with running_agent(root) as running:
        yield running


class TestPeerSink(SinkContract):
    """Writes through another node's agent."""

    @pytest.fixture
    def path(self, agent: RunningAgent) -> Path:
        store, save_id = LocalStore(agent.root), uuid4().hex
        store.begin(Intent(save_id, f"step-{save_id}", "by hand", overwrite=True))
        return store.path_of_staged(save_id, SHARD)

    @pytest.fixture
    def sink(self, agent: RunningAgent, path: Path) -> Sink:
        return PeerSink(agent.endpoint.address(), path.parent.name, SHARD, durable=True)

    @pytest.fixture
    def stored(self, path: Path) -> ReadBack:
        return lambda: read_if_there(path)


class TestPeerShard(ShardContract):
    """Reads through another node's agent."""

    @pytest.fixture(autouse=True)
    def other_node(self, agent: RunningAgent) -> None:
        self.agent = agent

    def shard_for(self, raw: bytes, expected: Expected) -> VerifiedShard:
        (self.agent.root / "step-1" / SHARD).write_bytes(raw)
        return PeerShard(self.agent.peer(), "step-1", f"{1:032x}", SHARD, expected)


class TestMemoryShard(ShardContract):
    def shard_for(self, raw: bytes, expected: Expected) -> VerifiedShard:
        return MemoryShard(raw, SHARD, expected)


class TestObjectShard(ShardContract):
    def shard_for(self, raw: bytes, expected: Expected) -> VerifiedShard:
        client = MemoryClient(MEMORY)
        client.put(SHARD, raw)
        return ObjectShard(Bucket(client), SHARD, expected)


class TestShardFile(ShardContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / SHARD

    def shard_for(self, raw: bytes, expected: Expected) -> VerifiedShard:
        self.path.write_bytes(raw)
        return ShardFile(partial(os.open, self.path, os.O_RDONLY | os.O_CLOEXEC), "own store", SHARD, expected)


class FirstPage(MemoryClient):
    """A client that lists all objects, but only the first 1,000 directories."""

    def list_keys(self, directory: str) -> Listing:
        listing = super().list_keys(directory)
        return Listing(listing.sizes, listing.directories[:1000])


def test_a_store_that_loses_directories_fails_the_contract() -> None:
    """The contract detects a client that drops directories of later pages, which are checkpoints at a bucket's top
    level.
    """
    client = FirstPage(MEMORY)
    with pytest.raises(AssertionError):
        ObjectClientContract().test_a_long_listing_is_whole(client, client.objects)
