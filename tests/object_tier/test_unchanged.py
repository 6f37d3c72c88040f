"""The agent copies a linked file inside the bucket instead of uploading it again. Every checkpoint there is complete."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client import parts, s3
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import CommittedShard
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import METADATA, checkpointed, findings
from tests.buckets.servers import Server
from tests.buckets.weak import WeakStore
from tests.object_tier.test_uploader import uploading

NAME = "__0_3.distcp"
"""A name of a file of unchanged entries."""
SIZE = 11 << 20


def link(store: LocalStore, before: Manifest) -> Manifest:
    """Commits the next checkpoint, whose one shard is a hard link to the previous checkpoint's shard."""
    number = before.sequence + 1
    ((name, entry),) = before.shards.items()
    manifest = replace(
        before, save_id=f"{number:032x}", checkpoint_id=f"step-{number}", sequence=number, shards={NAME: entry}
    )
    source = CommittedShard(before.checkpoint_id, before.save_id, name, entry.size_bytes, entry.crc32c)
    store.begin(Intent(manifest.save_id, manifest.checkpoint_id, "by hand", overwrite=True))
    store.link_staged(manifest.save_id, NAME, source, DamageBook(store).has_file)
    store.put_small(manifest.save_id, ".metadata", METADATA)
    store.put_small(manifest.save_id, ".manifest.json", manifest.encode())
    store.commit(manifest.save_id)
    return manifest


def begin(folder: Path, url: str, *, sent_bytes: int = SIZE) -> tuple[Uploader, NodeService, UploadBook, Manifest]:
    """A node with step-1 and step-2 in the bucket, which share a file of unchanged entries."""
    uploader, service, book = uploading(folder, url)
    first = checkpointed([service.store], 1, {"__0_0.distcp": (0,)}, copies=1, size_bytes=SIZE, url=url)
    second = link(service.store, first)
    uploader.round()
    assert sent_bytes <= uploader.bytes_sent < 1.1 * sent_bytes
    return uploader, service, book, second


def check(bucket: Bucket, service: NodeService, *manifests: Manifest) -> None:
    """Each checkpoint is committed in the bucket with the node's bytes, and the node's store is intact."""
    for manifest in manifests:
        save = bucket.save_of(manifest.checkpoint_id)
        assert save is not None
        assert save.save_id == manifest.save_id
        data = memoryview(bytearray(manifest.shards[NAME].size_bytes))
        bucket.client.read(f"{manifest.checkpoint_id}/{NAME}", 0, data)
        assert data == (service.store.root / manifest.checkpoint_id / NAME).read_bytes()
    assert findings(service.store) == []


def upload_next(uploader: Uploader, service: NodeService, before: Manifest) -> tuple[Manifest, int]:
    """Uploads the next checkpoint. Returns its manifest, and the number of bytes sent."""
    sent, manifest = uploader.bytes_sent, link(service.store, before)
    uploader.round()
    return manifest, uploader.bytes_sent - sent


def test_a_share_gets_links(tmp_path: Path) -> None:
    """In a `file://` bucket the next checkpoint gets links, and the older ones may be removed."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, book, second = begin(tmp_path / "node", url)
    bucket = book.bucket(url)
    third, sent = upload_next(uploader, service, second)
    assert sent == 0
    check(bucket, service, second, third)
    there = bucket.save_of("step-2")
    assert there is not None
    bucket.remove(there)
    check(bucket, service, third)
    fourth, sent = upload_next(uploader, service, third)
    assert sent == 0
    check(bucket, service, third, fourth)


def uploading_to(
    server: Server, name: str, folder: Path, *, sent_bytes: int = SIZE
) -> tuple[Uploader, NodeService, Bucket, Manifest]:
    """Like `begin`, with an S3 bucket."""
    target = ObjectTarget.check_supported(f"s3://{server.make_bucket(name)}/run", server.storage_options())
    with mock.patch.object(ObjectTarget, "check_supported", return_value=target):
        uploader, service, book, second = begin(folder, target.url, sent_bytes=sent_bytes)
    return uploader, service, book.bucket(target.url), second


@pytest.mark.parametrize("part_bytes", [5 << 20, 512 << 20], ids=["parts", "one request"])
def test_s3_copies(moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """An S3 bucket copies the file in one request or in parts, and no byte is sent."""
    for module in (parts, s3):
        monkeypatch.setattr(module, "COPY_PART_BYTES", part_bytes)
    uploader, service, bucket, second = uploading_to(moto, f"copies-{part_bytes}", tmp_path / "node")
    third, sent = upload_next(uploader, service, second)
    assert sent == 0
    check(bucket, service, second, third)


def test_a_store_that_ignores_copies_gets_the_bytes(weak_store: WeakStore, tmp_path: Path) -> None:
    """A store that ignores the copy header writes an empty object: the agent detects that, and uploads the bytes."""
    uploader, service, bucket, second = uploading_to(weak_store, "no-copies", tmp_path / "node", sent_bytes=2 * SIZE)
    third, sent = upload_next(uploader, service, second)
    assert sent >= SIZE
    check(bucket, service, second, third)


def lose_source(bucket: Bucket) -> None:
    there = bucket.save_of("step-2")
    assert there is not None
    bucket.remove(there)


def replace_source(bucket: Bucket) -> None:
    """Writes other bytes of the same size, as another job would."""
    bucket.client.put(f"step-2/{NAME}", bytes(bucket.client.size_bytes(f"step-2/{NAME}")))


@pytest.mark.parametrize("change", [lose_source, replace_source])
def test_a_changed_or_removed_source_is_uploaded(tmp_path: Path, change: object) -> None:
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, book, second = begin(tmp_path / "node", url)
    assert callable(change)
    change(book.bucket(url))
    third, sent = upload_next(uploader, service, second)
    assert sent >= SIZE
    check(book.bucket(url), service, third)


def test_a_file_that_was_written_anew_is_uploaded(tmp_path: Path) -> None:
    """A file with the same bytes but another inode, such as a repaired copy, is uploaded."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, book, second = begin(tmp_path / "node", url)
    path = service.store.root / "step-2" / NAME
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    third, sent = upload_next(uploader, service, second)
    assert sent >= SIZE
    check(book.bucket(url), service, second, third)
