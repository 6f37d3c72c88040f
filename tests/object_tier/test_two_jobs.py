"""Two jobs share one bucket or one directory: neither treats the other's files as its own."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, failpoints
from replicated_ckpt.errors import (
    CheckpointNotFound,
    ConfigInvalid,
    ReplicatedCkptWarning,
    StoreUnavailable,
    UploadFailed,
)
from replicated_ckpt.node.uploads import uploader as uploader_module
from replicated_ckpt.stores.bucket.inspection import BucketInspector
from tests.agent.agents import stop_agent
from tests.agent.checkpoints import checkpointed, shard
from tests.buckets.faulty_bucket import faulty_bucket
from tests.buckets.servers import Server
from tests.object_tier.test_one_node import assert_loads, contents, save
from tests.object_tier.test_uploader import uploading

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@contextmanager
def saved_unseen(root: Path, where: Mapping[str, Any], moto: Server) -> Iterator[ReplicatedWriter]:
    """Saves step-1 while the bucket is unreachable. Yields the writer once the bucket is reachable again."""
    with faulty_bucket(moto) as proxy, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedCkptWarning)
        proxy.away()
        options = {**where, "storage_options": proxy.storage_options(), "overwrite": False}
        writer = ReplicatedWriter(root, **options)
        dcp.save(contents(2), checkpoint_id="step-1", storage_writer=writer)
        proxy.back()
        yield writer


def test_another_runs_checkpoint_in_the_bucket_is_not_taken_for_this_save(
    root: Path, tmp_path: Path, where: Mapping[str, Any], moto: Server
) -> None:
    """The bucket has another run's newer step-1, and keeps it. `wait` raises once and names the next step. The nodes
    keep this run's step-1.
    """
    other = tmp_path / "other"
    with mock.patch.object(time, "time", return_value=time.time() + 365 * 86400):
        save(ReplicatedWriter(other, ack="object", **where), "step-1", 1)
    stop_agent(other)
    with saved_unseen(root, where, moto) as writer:
        with pytest.raises(UploadFailed, match=r"of another run.*upload ID"):
            writer.wait(60)
        dcp.save(contents(3), checkpoint_id="step-2", storage_writer=writer)
        assert writer.wait(60) == ("step-2",)
    assert_loads(ReplicatedReader(root), "step-1", 2)
    assert_loads(ReplicatedReader(**where), "step-1", 1)


def test_a_save_that_may_not_overwrite_does_not_replace_an_older_runs_checkpoint_in_the_bucket(
    root: Path, tmp_path: Path, where: Mapping[str, Any], moto: Server
) -> None:
    """The bucket was unreachable at a save with `overwrite=False`: its later upload does not replace the other run's
    checkpoint.
    """
    other = tmp_path / "other"
    save(ReplicatedWriter(other, ack="object", **where), "step-1", 1)
    stop_agent(other)
    with saved_unseen(root, where, moto) as writer, pytest.raises(UploadFailed, match=r"of another run"):
        writer.wait(60)
    assert_loads(ReplicatedReader(root), "step-1", 2)
    assert_loads(ReplicatedReader(**where), "step-1", 1)


@pytest.mark.parametrize("below", ["", "/bucket", "/.."])
def test_a_bucket_lies_beside_the_root(tmp_path: Path, below: str) -> None:
    """A `file://` bucket inside the root, or around it, is refused: its commits would replace the node's `.metadata`."""
    root = tmp_path / "node"
    with pytest.raises(ConfigInvalid, match="lie one inside the other"):
        ReplicatedWriter(root, object_store=f"file://{root}{below}")
    ReplicatedWriter(root, object_store=f"file://{root}-bucket")


def test_a_store_is_no_bucket(tmp_path: Path) -> None:
    """A node's store as `object_store` is refused. Before, a load reported damaged commit marks."""
    dcp.save(contents(1), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path / "node", copies=1))
    reader = ReplicatedReader(object_store=f"file://{tmp_path}/node")
    with pytest.raises(CheckpointNotFound, match="is a node's store, not a bucket"):
        dcp.load(contents(2), checkpoint_id="step-1", storage_reader=reader)
    with pytest.raises(ConfigInvalid, match="is a node's store"):
        ReplicatedWriter(tmp_path / "other", object_store=f"file://{tmp_path}/node")
    assert_loads(ReplicatedReader(tmp_path / "node"), "step-1", 1)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_mark_never_stands_beside_shards_of_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Two uploads to one free id interleave: no mark is committed with shards of the other save."""
    monkeypatch.setattr(uploader_module, "SHARDS_PARALLEL", at_once)
    url = f"file://{tmp_path}/bucket/run"
    (first, *_), (second, *_) = sides = [uploading(tmp_path / name, url) for name in ("first", "second")]
    shards = {shard(0): (0,), shard(1): (0,)}
    manifests = [
        checkpointed([service.store], number, shards, copies=1, size_bytes=3000, url=url)
        for number, (_, service, _) in enumerate(sides, 1)
    ]
    arrived: list[str] = []

    def cross(_: str) -> None:
        arrived.append("")
        if len(arrived) == 1:
            second.round()
        elif len(arrived) == 2:
            raise StoreUnavailable(url, "write", shard(1), "the second upload is cut before its other shard")

    with failpoints.arm("upload.shard-arrived", cross):
        first.round()
    bucket = sides[0][2].bucket(url)
    if at_once == 1:
        assert len(arrived) == 3
        assert bucket.save_of("step-1") is None, "one of the shards is the other save's"
    assert list(BucketInspector(bucket).inspect()) == []
    for uploader in (first, second):
        uploader.try_now()
        uploader.round()
    there = bucket.save_of("step-1")
    assert there is not None
    assert there.save_id == manifests[0].save_id or at_once > 1
    assert list(BucketInspector(bucket).inspect()) == []


def test_a_mark_never_stands_beside_the_manifest_of_another_save(tmp_path: Path) -> None:
    """Another job's manifest replaces this upload's before its commit: the committed checkpoint still has its own
    manifest.
    """
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url)

    def overwrite(_: str) -> None:
        (tmp_path / "bucket/run/step-1/.manifest.json").write_bytes(b"another save's")

    with failpoints.arm("upload.manifest-put", overwrite):
        uploader.round()
    bucket = targets.bucket(url)
    assert bucket.save_of("step-1") is not None
    assert list(BucketInspector(bucket).inspect()) == []


@pytest.mark.parametrize("name", [".manifest.json", shard(0)])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_an_order_uploads_damaged_objects_again(tmp_path: Path, name: str, *, is_deleted: bool) -> None:
    """An order to upload replaces objects that were deleted or damaged after the commit, although the mark is there."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    manifest = checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url)
    uploader.round()
    path = tmp_path / "bucket/run/step-1" / name
    if is_deleted:
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))
    uploader.order(manifest.save_id, url)
    uploader.round()
    bucket = targets.bucket(url)
    assert bucket.save_of("step-1") is not None
    assert list(BucketInspector(bucket).inspect()) == []
    assert not uploader.is_busy
