"""A store or a bucket that others can write: no file blocks a call, fills the memory, or affects another checkpoint."""

import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from replicated_ckpt.core.commit_mark import MARK_BYTES, CommitMark, decode_mark
from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, SEQUENCE_MAX
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.core.upkeep.repair_plan import Problem
from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.bucket.inspection import BucketInspector
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.local.unmanaged import UncheckedItems, UnmanagedDirectory, UnmanagedFileShard
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.verified import Expected, VerifiedShard
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, shard
from tests.fault.hostile.test_hostile_peers import memory_at_most

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]
TERABYTE = 1 << 40


def filled(path: Path) -> None:
    """Replaces the file by a sparse one of a terabyte."""
    path.unlink()
    with path.open("wb") as file:
        file.truncate(TERABYTE)


def piped(path: Path) -> None:
    """Replaces the file by a named pipe: a process that opens it for reading waits for a writer."""
    path.unlink()
    os.mkfifo(path)


WAYS: dict[str, Callable[[Path], None]] = {"a pipe": piped, "a terabyte": filled}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with two checkpoints of the package, one that stock torch could have written, and an open save."""
    store = LocalStore(tmp_path / "root")
    for number, name in ((1, "step-1"), (2, "step-2")):
        checkpointed([store], number, {shard(0): (0,)}, copies=1, size_bytes=1000, checkpoint_id=name)
    stock = store.root / "stock"
    shutil.copytree(store.root / "step-2", stock)
    (stock / MANIFEST_NAME).unlink()
    save_id = "c" * 32
    store.begin(Intent(save_id, "step-3", "s", overwrite=False))
    for name in (METADATA_NAME, MANIFEST_NAME):
        store.put_small(save_id, name, b"{}")
    return store


PLACES = ["step-1/.metadata", "step-1/.manifest.json", "step-1/__0_0.distcp", "stock/.metadata", "stock/__0_0.distcp"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "place", [*PLACES, ".staging/{save}/.manifest.json", ".staging/{save}/.metadata", ".staging/{save}.json"]
)
def test_one_bad_file_does_not_stop_listings(store: LocalStore, way: str, place: str) -> None:
    """Whichever file of step-1, of the stock checkpoint or of the open save is replaced: the node soon lists step-2,
    and finds it intact.
    """
    WAYS[way](store.root / place.format(save="c" * 32))
    fresh, node = LocalStore(store.root), store.node_id()
    held = {holding.checkpoint_id for holding in fresh.catalog.holdings(node)}
    assert "step-2" in held
    UnclaimedFilesReader(fresh, node).find_files()
    UnmanagedDirectory(fresh.root).holdings(node)
    fresh.list_staged()
    assert not fresh.is_decided("c" * 32)
    fresh.is_decision_damaged("c" * 32)
    if not place.startswith(".staging") and way == "a pipe":
        checkpoint_id = place.partition("/")[0]
        found = [finding for finding in Inspector(fresh, node).inspect() if finding.checkpoint_id == checkpoint_id]
        assert found or checkpoint_id == "stock"
    assert list(Inspector(fresh, node).inspect("step-2")) == []


def test_an_agent_answers_from_a_store_with_pipes(store: LocalStore) -> None:
    """This covers each route that reads the whole store, and the route for the file itself."""
    save_id = store.catalog.save_id_of("step-1")
    for place in ("step-1/__0_0.distcp", "stock/.metadata", f".staging/{'c' * 32}/.manifest.json"):
        piped(store.root / place)
    with running_agent(store.root, "--lost-after-s", "600") as agent, agent.client(20) as client:
        for path in ("/v1/status", "/v1/holdings", "/v1/unmanaged", f"/v1/saves/{'c' * 32}"):
            client.call("GET", path)
        with pytest.raises(ReplicatedCkptError):
            client.fetch("GET", file_path("step-1", save_id, "__0_0.distcp"))
        findings = client.call("POST", "/v1/verify", {})["findings"]
        assert {finding["name"] for finding in findings} >= {"__0_0.distcp"}


def sparse_shard(directory: Path, kind: str) -> VerifiedShard:
    """A sparse file of a terabyte, described as one item."""
    path = directory / "step-1" / shard(0)
    path.parent.mkdir()
    path.touch()
    filled(path)
    if kind == "stock's":
        whole = UncheckedItems([ByteRange(0, TERABYTE)])
        return UnmanagedFileShard(UnmanagedDirectory(directory), "step-1", shard(0), Expected(TERABYTE, 0), whole)
    expected = Expected(TERABYTE, 0, BlockTable(TERABYTE, TERABYTE, (0,)))
    return ShardFile(partial(os.open, path, os.O_RDONLY), "here", shard(0), expected)


@pytest.mark.parametrize("kind", ["ours", "stock's"])
def test_an_item_of_a_terabyte_is_a_bad_copy(tmp_path: Path, kind: str) -> None:
    """An item that does not fit into memory is an error of that copy, after which a load tries the next copy."""
    reader = sparse_shard(tmp_path, kind).open()
    with memory_at_most(1 << 30), pytest.raises(ObjectCorrupt, match=f"item of {TERABYTE} bytes does not fit"):
        reader.read(0, TERABYTE)
    reader.close()


def mark_of(sequence: int) -> bytes:
    return CommitMark("a" * 32, sequence, 1.0, 1, 2, has_own_prefix=False, lineage="b" * 16).encode()


def test_a_mark_has_the_same_largest_sequence_as_a_manifest() -> None:
    """Otherwise one object in the bucket would break every listing of checkpoints by several ranks."""
    assert decode_mark(mark_of(SEQUENCE_MAX)) is not None
    assert decode_mark(mark_of(SEQUENCE_MAX + 1)) is None
    assert decode_mark(mark_of((1 << 64) - 1)) is None


def test_sizes_in_a_bucket_are_checked(tmp_path: Path) -> None:
    """Objects of a terabyte and negative sizes become findings and errors of the package, and take no memory."""
    bucket = Bucket(DirectoryClient(ObjectTarget(f"file://{tmp_path}", {})))
    directory = tmp_path / "step-1"
    directory.mkdir()
    with (directory / METADATA_NAME).open("wb") as file:
        file.seek(TERABYTE)
        file.write(mark_of(1))
    (finding,) = [one for one in BucketInspector(bucket).inspect() if one.name == METADATA_NAME]
    assert finding.problem is Problem.CORRUPT
    assert str(TERABYTE) in finding.found
    for size in (-1, TERABYTE):
        with pytest.raises(ObjectCorrupt, match=str(size)):
            bucket.small("step-1/.metadata", size)
    save = BucketSave("step-1", decode_mark(mark_of(1)), {}, -struct.calcsize("q") - MARK_BYTES)
    assert next(iter(BucketInspector(bucket)._of_save(save))).name == METADATA_NAME
