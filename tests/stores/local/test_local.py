"""The local store: a save counts completely or not at all, and replaces only what it may replace."""

import contextlib
import errno
import gc
import os
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.lineage import History
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    SaveAborted,
    SaveSuperseded,
    StoreDenied,
    StoreError,
    StoreFull,
)
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.files.durable import store_error_of
from replicated_ckpt.stores.local import identity
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink, ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.publish import check_decidable
from replicated_ckpt.stores.verified import Expected
from replicated_ckpt.testing.shards import table_of
from tests.agent.checkpoints import next_file_number, renumbered
from tests.damage import flip
from tests.harness.processes import open_below
from tests.killed import killed_at

SHARD, NEXT_SHARD = "__0_0.distcp", "__0_4.distcp"
METADATA = b"metadata"


def save_id(digit: int) -> str:
    return f"{digit:x}" * 32


def staged(
    store: LocalStore, number: int, data: bytes, *, checkpoint_id: str = "step-1", overwrite: bool = False
) -> str:
    """Stages and decides a save of one shard, without the commit. Its file name has the next free number."""
    name, shard = save_id(number), renumbered(SHARD, next_file_number([store], checkpoint_id))
    store.begin(Intent(name, checkpoint_id, "session", overwrite))
    table = table_of([data])
    sink = FileSink.create(store.path_of_staged(name, shard))
    sink.write(memoryview(data + table.encode()))
    sink.finish(table)
    node = store.node_id()
    manifest = Manifest(
        save_id=name,
        checkpoint_id=checkpoint_id,
        sequence=number,
        created_unix_s=0.0,
        world_size=1,
        copies=1,
        metadata_bytes=len(METADATA),
        metadata_crc32c=crc32c(METADATA),
        nodes=(NodeEntry(node, "host", None, (0,)),),
        shards={shard: ShardEntry(table.file_bytes, table.file_crc(), 0, node, (node,))},
    )
    store.put_small(name, ".metadata", METADATA)
    store.put_small(name, ".manifest.json", manifest.encode())
    return name


def content(store: LocalStore, checkpoint_id: str = "step-1") -> bytes:
    manifest = store.catalog.manifest(checkpoint_id)
    ((name, entry),) = manifest.shards.items()
    open_file = partial(store.open_file, checkpoint_id, manifest.save_id, name)
    shard = ShardFile(open_file, "here", name, Expected(entry.size_bytes, entry.crc32c)).open()
    try:
        return bytes(shard.read(0, shard.table.data_bytes))
    finally:
        shard.close()


def test_identity_is_made_once(tmp_path: Path) -> None:
    """Every process of a node reads the same identity, also through a link to the root. A damaged identity is refused."""
    first = LocalStore(tmp_path / "node").node_id()
    (tmp_path / "alias").symlink_to(tmp_path / "node")
    assert LocalStore(tmp_path / "alias").node_id() == first
    assert LocalStore(tmp_path / "other").node_id() != first
    (tmp_path / "node" / "node.json").write_text("{}")
    with pytest.raises(ConfigInvalid, match="no node identity"):
        LocalStore(tmp_path / "node").node_id()


@pytest.mark.parametrize("can_keep_a_name", [True, False])
@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_identity_is_made_where_files_have_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, can_keep_a_name: bool
) -> None:
    """Without hard links the identity is made, too. The second of two processes uses the first one's."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    if not can_keep_a_name:
        monkeypatch.setattr(durable, "_renameat2", lambda *_: False)
    first = LocalStore(tmp_path / "node").node_id()
    fresh = tmp_path / "node" / ".node.json.fresh"
    fresh.write_text(f'{{"node_id": "{first}x"}}')
    identity._name_if_free(fresh, tmp_path / "node" / "node.json")
    assert LocalStore(tmp_path / "node").node_id() == first


def test_nothing_counts_before_the_commit(tmp_path: Path) -> None:
    """A staged save is no checkpoint. After its commit it is one, and its staging directory is gone."""
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"one")
    assert store.catalog.holdings("n") == ()
    assert store.commit(name) == (SHARD,)
    assert content(store) == b"one"
    assert store.list_staged() == ()
    assert store.commit(name) == (SHARD,), "a second commit changes nothing"


def test_a_save_that_is_completed_twice_leaves_no_staging_directory(tmp_path: Path) -> None:
    """Two processes complete one save: the second finds it committed without an intent, and removes its staging
    directory.
    """
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"one")
    assert store.commit(name) == (SHARD,)
    staging = store.staging(name)
    staging.mkdir()
    for file in (".metadata", ".manifest.json"):
        shutil.copy(store.final("step-1") / file, staging)
    assert store.commit(name) == (SHARD,)
    assert not staging.exists()
    assert content(store) == b"one"


def test_an_overwrite_replaces_the_whole_checkpoint(tmp_path: Path) -> None:
    """The old checkpoint stays until the new one is committed. Then no file of the old one is left."""
    store = LocalStore(tmp_path)
    store.commit(staged(store, 1, b"old"))
    name = staged(store, 2, b"new", overwrite=True)
    assert content(store) == b"old"
    store.commit(name)
    assert content(store) == b"new"
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == [".manifest.json", ".metadata", NEXT_SHARD]
    assert list((tmp_path / ".staging").iterdir()) == []


@pytest.mark.parametrize("point", ["commit.described", "commit.prepared", "commit.named", "commit.durable"])
def test_a_commit_that_a_crash_interrupted_is_completed(tmp_path: Path, point: str) -> None:
    """After a crash in a commit, the old or the new version is there, intact. The agent's next start completes the
    commit.
    """
    store = LocalStore(tmp_path)
    store.commit(staged(store, 1, b"old"))
    name = staged(store, 2, b"new", overwrite=True)
    killed_at(point, lambda: store.commit(name))
    assert content(store) == (b"new" if point in ("commit.named", "commit.durable") else b"old")
    assert NodeService(store).recover() == (name,)
    assert store.list_staged() == ()
    assert store.commit(name) == (NEXT_SHARD,)
    assert content(store) == b"new"
    assert list(store.catalog.read_replaced()) == []


@pytest.mark.parametrize("point", ["commit.described", "commit.prepared"])
@pytest.mark.parametrize("is_over", [False, True])
def test_a_first_commit_that_a_crash_interrupted_is_completed_or_aborted(
    tmp_path: Path, point: str, *, is_over: bool
) -> None:
    """After a crash in a first commit, its shards count as no other checkpoint: the save is completed, or aborted
    without a trace.
    """
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"first")
    killed_at(point, lambda: store.commit(name))
    assert list(store.catalog.with_invalid_manifest()) == list(store.catalog.without_manifest()) == []
    if is_over:
        store.abort(name)
        assert not (tmp_path / "step-1").exists()
    else:
        assert NodeService(store).recover() == (name,)
        assert content(store) == b"first"
    assert store.list_staged() == ()


def test_repaired_metadata_has_its_name(tmp_path: Path) -> None:
    """After a repair of `.metadata`, the directory has exactly the saved files under their names."""
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"first")
    store.commit(name)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-1").iterdir()}
    flip(tmp_path / "step-1" / ".metadata", 3)
    with open_committed_save(tmp_path, "step-1", name) as (version, _):
        version.put_small(".metadata", METADATA)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-1").iterdir()} == before


def test_a_crash_without_hard_links_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, a crash in an overwrite can leave no checkpoint. The agent's next start completes it."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    store = LocalStore(tmp_path)
    store.commit(staged(store, 1, b"old"))
    name = staged(store, 2, b"new", overwrite=True)
    monkeypatch.setattr(os, "link", refuse)
    killed_at("commit.prepared", lambda: store.commit(name))
    assert NodeService(store).recover() == (name,)
    assert content(store) == b"new"


def test_one_save_that_cannot_be_completed_does_not_stop_the_others(tmp_path: Path) -> None:
    """An agent starts although one decided save is blocked, and completes the others."""
    store = LocalStore(tmp_path)
    blocked = staged(store, 1, b"blocked")
    store.commit(staged(store, 2, b"there"))
    good = staged(store, 3, b"good", checkpoint_id="step-3")
    assert NodeService(store).recover() == (good,)
    assert content(store) == b"there"
    assert content(store, "step-3") == b"good"
    assert [intent.save_id for intent in store.list_staged()] == [blocked]


def test_two_threads_that_publish_one_save_do_not_undo_it(tmp_path: Path) -> None:
    """Two threads complete one overwrite at once, as a peer's request and a load can: both succeed, and no staging
    directory is left.
    """
    store = LocalStore(tmp_path)
    store.commit(staged(store, 1, b"old"))
    name = staged(store, 2, b"new", overwrite=True)
    both = threading.Barrier(2)

    def meet(_: str) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)

    with failpoints.arm("commit.checked", meet), ThreadPoolExecutor(2) as threads:
        held = [threads.submit(LocalStore(tmp_path).commit, name) for _ in range(2)]
        assert [future.result(timeout=20) for future in held] == [(NEXT_SHARD,), (NEXT_SHARD,)]
    assert content(store) == b"new"
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_decided_stale_save_is_completed_before_the_next_save_begins(tmp_path: Path) -> None:
    """Opening a save first completes decided stale saves. A save of the same id is then refused, and another one opens."""
    store = LocalStore(tmp_path)
    service = NodeService(store)
    decided = staged(store, 1, b"decided")
    with pytest.raises(CheckpointExists):
        service.open_save(Intent(save_id(2), "step-1", "session", overwrite=False))
    assert content(store) == b"decided"
    also = staged(store, 3, b"also", checkpoint_id="step-3")
    assert service.open_save(Intent(save_id(4), "step-4", "session", overwrite=False)) == ({"": History(3)}, ())
    assert content(store, "step-3") == b"also"
    assert service.state_of(decided)["state"] == service.state_of(also)["state"] == "committed"


def test_a_load_right_after_a_crash_completes_a_decided_save(tmp_path: Path) -> None:
    """Of two stale saves without a lock, settling publishes the decided one, and leaves the other staged."""
    store = LocalStore(tmp_path)
    service = NodeService(store)
    for number in (1, 2):
        service.open_save(Intent(save_id(number), f"step-{number}", f"session {number}", overwrite=False))
    staged(store, 1, b"decided")
    settle(service, service.list_stale_saves(), ())
    assert content(store) == b"decided"
    assert [intent.save_id for intent in store.list_staged()] == [save_id(2)]


def test_an_existing_checkpoint_is_not_overwritten_unasked(tmp_path: Path) -> None:
    """Without `overwrite`, a save is refused when it begins, or at its commit if another save was faster."""
    store = LocalStore(tmp_path)
    slow = staged(store, 1, b"slow")
    store.commit(staged(store, 2, b"fast"))
    with pytest.raises(CheckpointExists):
        staged(store, 3, b"late")
    with pytest.raises(SaveSuperseded):
        store.commit(slow)
    assert content(store) == b"fast"


def test_a_save_without_overwrite_is_not_decided_after_a_faster_one(tmp_path: Path) -> None:
    """Of two saves of one id without `overwrite`, the slower is refused before its decision."""
    store = LocalStore(tmp_path)
    store.begin(Intent(save_id(2), "step-1", "session", overwrite=False))
    check_decidable(store.root, store.intent_of(save_id(2)))
    store.commit(staged(store, 1, b"fast"))
    with pytest.raises(CheckpointExists):
        check_decidable(store.root, store.intent_of(save_id(2)))


def test_a_decided_save_replaces_an_older_one_without_overwrite(tmp_path: Path) -> None:
    """A decided save replaces an older one even without `overwrite`, because other nodes may have published it."""
    store = LocalStore(tmp_path)
    service = NodeService(store)
    newer = staged(store, 2, b"newer")
    store.commit(staged(store, 1, b"older"))
    assert service.state_of(newer)["state"] == "committed"
    assert content(store) == b"newer"


def test_the_cached_manifest_of_a_removed_checkpoint_is_dropped(tmp_path: Path) -> None:
    """After a checkpoint was removed, the catalog drops its cached manifest at the next lookup."""
    store = LocalStore(tmp_path)
    for number, data in enumerate((b"first", b"second"), 1):
        store.commit(staged(store, number, data, checkpoint_id=f"step-{number}"))
        assert store.catalog.checkpoint_of(save_id(number)) == f"step-{number}"
        if number == 1:
            kept = weakref.ref(store.catalog.manifest("step-1"))
            shutil.rmtree(tmp_path / "step-1")
    gc.collect()
    assert kept() is None


def test_a_damaged_decision_is_not_committed(tmp_path: Path) -> None:
    """A save whose metadata does not match its manifest is refused, and stays staged."""
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"data")
    (store.staging(name) / ".metadata").write_bytes(b"metadatX")
    with pytest.raises(ObjectCorrupt):
        store.commit(name)
    assert not store.is_decided(name)
    assert store.catalog.holdings("n") == ()


def test_an_aborted_save_leaves_nothing(tmp_path: Path) -> None:
    """Abort removes the staged files, may be repeated, and later writes of that save are refused."""
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"data")
    store.abort(name)
    store.abort(name)
    assert store.list_staged() == ()
    with pytest.raises(SaveAborted):
        store.commit(name)
    with pytest.raises(SaveAborted):
        store.put_small(name, ".metadata", b"x")
    with pytest.raises(SaveAborted):
        FileSink.create(store.path_of_staged(name, SHARD))


def test_a_file_counts_only_when_it_is_complete(tmp_path: Path) -> None:
    """An unfinished shard has no final name, and is not committed."""
    store = LocalStore(tmp_path)
    name = staged(store, 1, b"data")
    sink = FileSink.create(store.path_of_staged(name, "__1_0.distcp"))
    sink.write(memoryview(b"half"))
    (store.staging(name) / ".metadata.77.tmp").write_bytes(b"half")
    assert not store.path_of_staged(name, "__1_0.distcp").exists()
    assert store.commit(name) == (SHARD,)
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == [".manifest.json", ".metadata", SHARD]
    sink.discard()


@pytest.mark.parametrize("where", ["fchmod", "rename"])
def test_a_file_that_the_disk_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """fchmod or rename fails: no partial file and no open descriptor is left."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def write() -> None:
        sink = FileSink.create(path)
        try:
            sink.finish_durably()
        except StoreError:
            sink.discard()
            raise

    store = LocalStore(tmp_path)
    path = store.path_of_staged(staged(store, 1, b"data"), "__1_0.distcp")
    before = open_below(tmp_path)
    monkeypatch.setattr(*{"fchmod": (os, "fchmod"), "rename": (Path, "rename")}[where], refuse)
    with pytest.raises(StoreFull):
        write()
    monkeypatch.undo()
    assert not list(path.parent.glob("__1_0*"))
    assert open_below(tmp_path) == before


@pytest.mark.parametrize("name", ["../x", "node.json", "/etc/passwd", "__0_0.distcp/../../x", ""])
def test_only_files_of_a_checkpoint_can_be_named(tmp_path: Path, name: str) -> None:
    """A name from outside reaches no file but a checkpoint's."""
    store = LocalStore(tmp_path)
    saved = staged(store, 1, b"data")
    with pytest.raises(ConfigInvalid):
        store.path_of_staged(saved, name)
    store.commit(saved)
    with pytest.raises(ObjectMissing):
        store.open_file("step-1", saved, name)
    with pytest.raises(ConfigInvalid):
        store.open_file("../x", saved, SHARD)


def test_files_of_another_save_are_not_served(tmp_path: Path) -> None:
    """A request for a save that was overwritten finds no file, never the other save's bytes."""
    store = LocalStore(tmp_path)
    store.commit(staged(store, 1, b"old"))
    store.commit(staged(store, 2, b"new", overwrite=True))
    with pytest.raises(ObjectMissing, match="not of save"):
        store.open_file("step-1", save_id(1), SHARD)


@pytest.mark.parametrize("damage", ["flip", "flip footer", "truncate", "empty", "swap"])
def test_no_damaged_byte_is_returned(tmp_path: Path, damage: str) -> None:
    """Every kind of damage to a shard raises ObjectCorrupt with the file and checksums."""
    store = LocalStore(tmp_path)
    store.commit(staged(store, 1, bytes(range(256)) * 4096))
    path = tmp_path / "step-1" / SHARD
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[300_000] ^= 4
    elif damage == "flip footer":
        raw[-30] ^= 4
    elif damage == "truncate":
        del raw[-1]
    elif damage == "empty":
        raw.clear()
    else:
        data = bytes(len(raw) - len(table_of([bytes(256) * 4096]).encode()))
        raw = bytearray(data + table_of([data]).encode())
    path.write_bytes(raw)
    with pytest.raises(ObjectCorrupt, match=r"__0_0.distcp.*(expected|footer)"):
        content(store)


def test_undamaged_blocks_of_a_damaged_file_are_still_read(tmp_path: Path) -> None:
    """Damage affects only its blocks, not the rest of the file."""
    store = LocalStore(tmp_path)
    data = os.urandom(1 << 20)
    saved = staged(store, 1, data)
    store.commit(saved)
    path = tmp_path / "step-1" / SHARD
    flip(path, 600_000)
    entry = store.catalog.manifest("step-1").shards[SHARD]
    open_file = partial(store.open_file, "step-1", saved, SHARD)
    shard = ShardFile(open_file, "here", SHARD, Expected(entry.size_bytes, entry.crc32c)).open()
    assert bytes(shard.read(1000, 500_000)) == data[1000:501_000]
    with pytest.raises(ObjectCorrupt):
        shard.read(524_288, 100_000)
    with pytest.raises(ObjectCorrupt, match="outside"):
        shard.read(0, len(data) + 1)
    shard.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EROFS, StoreDenied), (errno.EIO, StoreError)],
)
def test_system_errors_become_typed_errors(code: int, kind: type[StoreError]) -> None:
    """Full, read-only and failing disks raise different errors, with store, operation and key."""
    error = store_error_of(OSError(code, os.strerror(code)), "node n", "write", "x")
    assert type(error) is kind
    assert (error.store, error.op, error.key) == ("node n", "write", "x")
    assert os.strerror(code) in str(error)
