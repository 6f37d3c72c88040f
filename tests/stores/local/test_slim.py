"""Slimming on one node removes the optimizer and keeps the weights intact. A crash leaves the full or the slim
checkpoint.
"""

import os
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.parts import Part
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from replicated_ckpt.stores.local.versions.remove import retire, slim
from tests.agent.checkpoints import METADATA, WEIGHTS, checkpointed, findings, held, shard, with_optimizer

WHOLE = with_optimizer({shard(0): [0], shard(1): [0]})
POINTS = [name for name in failpoints.POINTS if name.startswith("slim.")]
FULL_METADATA = METADATA + WEIGHTS


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    store.node_id()
    return store


def crash(name: str) -> None:
    raise failpoints.FailpointReached(name)


def names(store: LocalStore, checkpoint_id: str = "step-1") -> set[str]:
    return {path.name for path in (store.root / checkpoint_id).iterdir()}


def check_slim(store: LocalStore, full: Manifest) -> None:
    """Only the weights are left, intact, for this package and for stock torch."""
    place = store.root / full.checkpoint_id
    assert names(store) == {".manifest.json", ".metadata", shard(0), shard(1)}
    assert (place / ".manifest.json").read_bytes() == full.slimmed().encode()
    assert (place / ".metadata").read_bytes() == WEIGHTS
    check_whole(store)


def check_whole(store: LocalStore) -> None:
    """Every file in the manifest is intact, and readers get the metadata of that manifest."""
    assert findings(store) == []
    (holding,) = store.catalog.holdings("node")
    manifest = store.catalog.manifest("step-1")
    assert holding.has_metadata
    assert holding.is_slim == manifest.is_slim
    assert held(store) == set(manifest.shards)
    with open_committed_save(store.root, "step-1", manifest.save_id) as (version, _):
        raw = version.raw_metadata(manifest)
    assert raw == (WEIGHTS if manifest.is_slim else FULL_METADATA)
    with os.fdopen(store.open_file("step-1", manifest.save_id, ".metadata"), "rb") as file:
        assert file.read() == raw


def test_slimming_removes_the_optimizer(store: LocalStore) -> None:
    """Slimming leaves the weights, a smaller metadata and a manifest. A second call changes nothing."""
    full = checkpointed([store], 1, WHOLE)
    assert slim(store.root, "step-1", full.save_id)
    check_slim(store, full)
    assert not slim(store.root, "step-1", full.save_id)
    check_slim(store, full)


def test_the_optimizers_files_are_recycled(store: LocalStore) -> None:
    """The pool can have the optimizer files of one checkpoint and the weights of another."""
    older = checkpointed([store], 1, {shard(0): [0]}, checkpoint_id="step-0")
    full = checkpointed([store], 2, WHOLE)
    (store.root / ".recycled").mkdir(exist_ok=True)
    (store.root / ".recycled" / "__9_1.recycled").touch()
    assert retire(store.root, "step-0", older.save_id)
    (store.root / ".recycled" / "__9_1.recycled").touch()
    (store.root / ".recycled" / "__9_0.recycled").touch()
    assert slim(store.root, "step-1", full.save_id, recycles=True)
    pool = {path.name for path in (store.root / ".recycled").iterdir()}
    assert pool == {"__9_0.recycled", "__0_1.recycled", "__1_1.recycled"}
    check_slim(store, full)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_leaves_one_or_the_other(store: LocalStore, point: str) -> None:
    """After a crash the checkpoint is consistent, also after the next start. Slimming again completes it."""
    full = checkpointed([store], 1, WHOLE)
    with failpoints.arm(point, crash), pytest.raises(failpoints.FailpointReached):
        slim(store.root, "step-1", full.save_id)
    check_whole(store)
    store.tidy(is_alone=True)
    check_whole(store)
    slim(store.root, "step-1", full.save_id)
    check_slim(store, full)


@pytest.mark.parametrize("point", POINTS)
def test_an_overwrite_after_a_crash(store: LocalStore, point: str) -> None:
    """An overwrite follows a crashed slimming: the replaced version keeps the metadata of its manifest, and can be
    dropped.
    """
    full = checkpointed([store], 1, WHOLE)
    with failpoints.arm(point, crash), pytest.raises(failpoints.FailpointReached):
        slim(store.root, "step-1", full.save_id)
    lock = lock_version(store.catalog, "step-1", full.save_id)
    assert lock is not None
    newer = checkpointed([store], 2, WHOLE)
    with open_committed_save(store.root, "step-1", newer.save_id) as (version, manifest):
        assert version.raw_metadata(manifest) == FULL_METADATA
    old = store.catalog.manifest_of("step-1", full.save_id)
    with os.fdopen(store.open_file("step-1", full.save_id, ".metadata"), "rb") as file:
        assert file.read() == (WEIGHTS if old.is_slim else FULL_METADATA)
    assert findings(store) == []
    lock.release()
    assert store.drop_replaced("step-1", full.save_id)
    assert findings(store) == []
    assert names(store) == {".manifest.json", ".metadata", *newer.shards}


@pytest.mark.parametrize("point", POINTS)
def test_a_removal_after_a_crash(store: LocalStore, point: str) -> None:
    """A removal after a crashed slimming leaves no file."""
    full = checkpointed([store], 1, WHOLE)
    with failpoints.arm(point, crash), pytest.raises(failpoints.FailpointReached):
        slim(store.root, "step-1", full.save_id)
    assert retire(store.root, "step-1", full.save_id)
    assert not (store.root / "step-1").exists()


def test_a_locked_version_keeps_its_optimizer(store: LocalStore) -> None:
    """A version that a load has locked keeps its optimizer."""
    full = checkpointed([store], 1, WHOLE)
    lock = lock_version(store.catalog, "step-1", full.save_id)
    assert lock is not None
    assert not slim(store.root, "step-1", full.save_id)
    assert store.catalog.manifest("step-1") == full
    lock.release()
    assert slim(store.root, "step-1", full.save_id)
    check_slim(store, full)


def test_a_checkpoint_that_cannot_be_slimmed_stays(store: LocalStore) -> None:
    """Without an optimizer, with another save id, in a renamed directory or with damaged metadata, no file changes."""
    plain = checkpointed([store], 1, {shard(0): [0]}, checkpoint_id="step-0")
    assert not slim(store.root, "step-0", plain.save_id)
    full = checkpointed([store], 2, WHOLE)
    assert not slim(store.root, "step-1", plain.save_id)
    assert not slim(store.root, "step-2", full.save_id)
    (store.root / "step-1").rename(store.root / "mine")
    assert not slim(store.root, "mine", full.save_id)
    (store.root / "mine").rename(store.root / "step-1")
    (store.root / "step-1" / ".metadata").write_bytes(FULL_METADATA[:-1] + b"!")
    with pytest.raises(ObjectCorrupt):
        slim(store.root, "step-1", full.save_id)
    assert names(store) == {".manifest.json", ".metadata", *full.shards}


def test_an_unreadable_manifest_keeps_the_optimizers_files(store: LocalStore) -> None:
    """While another manifest in the directory cannot be read, the optimizer's files stay, because that manifest may
    name them.
    """
    full = checkpointed([store], 1, WHOLE)
    bad = store.root / "step-1" / f".replaced.{'9' * 32}.json"
    bad.write_text("{}")
    assert slim(store.root, "step-1", full.save_id)
    assert shard(0, Part.OPTIMIZER) in names(store)
    bad.unlink()
    store.tidy(is_alone=True)
    check_slim(store, full)
