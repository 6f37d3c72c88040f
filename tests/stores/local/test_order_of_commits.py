"""The order of commits: every path of a commit compares with the published version, and replaced versions are kept
until they may be removed.
"""

import gc
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.config import Retention
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import ObjectMissing, SaveSuperseded
from replicated_ckpt.node.saves.collector import Collector
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.files.durable import make_directories
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from replicated_ckpt.stores.local.versions.remove import retire
from replicated_ckpt.testing.shards import table_of
from tests.agent.checkpoints import renumbered
from tests.agent.collecting import drop_superseded

RUN, OTHER = "a" * 16, "b" * 16
HERE, ELSEWHERE = "__0_0.distcp", "__1_0.distcp"
METADATA = b"metadata"


def numbered(name: str, number: int) -> str:
    """The name of the same rank's shard in the save of this number."""
    return renumbered(name, number)


def files_in(store: LocalStore) -> set[str]:
    return set(store.catalog.look("last").shards)


def replaced_in(store: LocalStore) -> list[str]:
    return [manifest.save_id for _, manifest in store.catalog.read_replaced()]


def open_save(
    store: LocalStore,
    number: int,
    lineage: str = RUN,
    *,
    checkpoint_id: str = "last",
    is_whole: bool = True,
    overwrite: bool = True,
) -> Manifest:
    """Stages and decides a save with `number` in its file names. Its second shard is on this node only if `is_whole`."""
    names = [numbered(name, number) for name in (HERE, ELSEWHERE)]
    contents = {name: f"{number}{name}".encode() * 100 for name in names}
    tables = {name: table_of([data]) for name, data in contents.items()}
    node = store.node_id()
    shards = {name: ShardEntry(table.file_bytes, table.file_crc(), 0, node, (node,)) for name, table in tables.items()}
    manifest = Manifest(
        save_id=f"{number:032x}",
        checkpoint_id=checkpoint_id,
        sequence=number,
        created_unix_s=float(number),
        world_size=1,
        copies=1,
        metadata_bytes=len(METADATA),
        metadata_crc32c=crc32c(METADATA),
        nodes=(NodeEntry(node, "host", None, (0,)),),
        shards=shards,
        lineage=lineage,
    )
    store.begin(Intent(manifest.save_id, checkpoint_id, "test", overwrite=overwrite))
    for name in names if is_whole else names[:1]:
        sink = FileSink.create(store.path_of_staged(manifest.save_id, name))
        sink.write(memoryview(contents[name] + tables[name].encode()))
        sink.finish(tables[name])
    store.put_small(manifest.save_id, ".metadata", METADATA)
    store.put_small(manifest.save_id, ".manifest.json", manifest.encode())
    return manifest


def published(store: LocalStore) -> str:
    found = store.catalog.find_manifest("last")
    assert found is not None
    return found.save_id


def read(store: LocalStore, manifest: Manifest, name: str) -> bytes:
    name = numbered(name, manifest.sequence)
    with open(store.open_file("last", manifest.save_id, name), "rb") as file:  # noqa: PTH123 - a descriptor
        return file.read()


def test_a_save_replaces_nothing_that_was_published_while_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `overwrite`, another run publishes between the check of the name and the commit: its save keeps the name."""
    store = LocalStore(tmp_path)
    theirs = open_save(store, 2, OTHER)
    make = make_directories

    def publish_meanwhile(path: Path, above: Path) -> None:
        monkeypatch.setattr("replicated_ckpt.stores.local.store.make_directories", make)
        make(path, above)
        store.commit(theirs.save_id)

    monkeypatch.setattr("replicated_ckpt.stores.local.store.make_directories", publish_meanwhile)
    ours = open_save(store, 3, overwrite=False)
    with pytest.raises(SaveSuperseded, match=theirs.save_id):
        store.commit(ours.save_id)
    assert published(store) == theirs.save_id


def test_an_older_save_never_takes_the_name_of_a_newer_one(tmp_path: Path) -> None:
    """An older, decided save that commits late is refused, and stays staged."""
    store = LocalStore(tmp_path)
    old, new = open_save(store, 1), open_save(store, 2)
    store.commit(new.save_id)
    for _ in range(2):
        with pytest.raises(SaveSuperseded, match=new.save_id):
            store.commit(old.save_id)
    assert published(store) == new.save_id
    assert [intent.save_id for intent in store.list_staged()] == [old.save_id]


def test_another_run_is_replaced_only_where_the_user_saw_it(tmp_path: Path) -> None:
    """A save of another lineage replaces only the version that was published when it opened."""
    store = LocalStore(tmp_path)
    store.commit(open_save(store, 5).save_id)
    other = open_save(store, 1, OTHER)
    store.commit(other.save_id)
    assert published(store) == other.save_id
    late = open_save(store, 9, RUN)
    store.commit(open_save(store, 2, OTHER).save_id)
    with pytest.raises(SaveSuperseded, match="lineage"):
        store.commit(late.save_id)


def test_a_replaced_version_is_read_until_it_is_dropped(tmp_path: Path) -> None:
    """While the new version is incomplete on this node, both versions are holdings. Dropping the old one leaves the new
    one.
    """
    store = LocalStore(tmp_path)
    old = open_save(store, 1)
    store.commit(old.save_id)
    before = read(store, old, ELSEWHERE)
    new = open_save(store, 2, is_whole=False)
    store.commit(new.save_id)
    assert published(store) == new.save_id
    assert read(store, old, ELSEWHERE) == before
    held = {holding.save_id: holding for holding in store.catalog.holdings("n", "last")}
    assert {save_id: holding.is_replaced for save_id, holding in held.items()} == {
        old.save_id: True,
        new.save_id: False,
    }
    assert set(held[old.save_id].sizes) == set(old.shards)
    assert set(held[new.save_id].sizes) == {numbered(HERE, 2)}
    store.drop_replaced("last", old.save_id)
    with pytest.raises(ObjectMissing):
        read(store, old, HERE)
    assert read(store, new, HERE)
    assert files_in(store) == {numbered(HERE, 2)}


def test_a_complete_version_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    """If all shards of the new version are on this disk, the replaced version is removed at once."""
    store = LocalStore(tmp_path)
    store.commit(open_save(store, 1).save_id)
    store.commit(open_save(store, 2).save_id)
    assert replaced_in(store) == []


class Killed(BaseException):
    """A simulated SIGKILL."""


@pytest.mark.parametrize("point", ["commit.described", "commit.prepared", "commit.named", "commit.durable"])
def test_a_crash_in_a_commit_keeps_both_versions(tmp_path: Path, point: str) -> None:
    """After a crash in the commit and a restart, the new version has the name and the old one is kept."""
    store = LocalStore(tmp_path)
    old = open_save(store, 1)
    store.commit(old.save_id)
    new = open_save(store, 2, is_whole=False)

    def die(_: str) -> None:
        raise Killed

    with failpoints.arm(point, die), pytest.raises(Killed):
        store.commit(new.save_id)
    again = LocalStore(tmp_path)
    again.commit(new.save_id)
    assert published(again) == new.save_id
    assert read(again, old, ELSEWHERE)
    assert again.list_staged() == ()


def replace_by_half(root: Path) -> tuple[LocalStore, Manifest, Manifest]:
    """Replaces a complete version by a newer one without its second shard. Returns the store and both manifests."""
    store = LocalStore(root)
    old = open_save(store, 1)
    store.commit(old.save_id)
    new = open_save(store, 2, is_whole=False)
    store.commit(new.save_id)
    return store, old, new


def test_a_version_that_is_published_again_has_its_shards(tmp_path: Path) -> None:
    """After the newer version was removed, the replaced version is published again, and listed once."""
    store, old, new = replace_by_half(tmp_path)
    assert retire(tmp_path, "last", new.save_id)
    store.begin(Intent(old.save_id, "last", "repair", overwrite=True))
    store.put_small(old.save_id, ".metadata", METADATA)
    store.put_small(old.save_id, ".manifest.json", old.encode())
    store.commit(old.save_id)
    assert files_in(store) == set(old.shards)
    assert published(store) == old.save_id
    assert replaced_in(store) == []


def test_retention_reaches_replaced_versions(tmp_path: Path) -> None:
    """Retention removes a replaced version, and the published one stays."""
    store, old, new = replace_by_half(tmp_path)
    assert retire(tmp_path, "last", old.save_id)
    assert replaced_in(store) == []
    assert published(store) == new.save_id


def test_a_replaced_version_is_found_after_the_newer_one_was_retired(tmp_path: Path) -> None:
    """After the newer version was retired, the replaced version opens like any other."""
    store, old, new = replace_by_half(tmp_path)
    assert retire(tmp_path, "last", new.save_id)
    assert list(store.catalog.committed()) == []
    with open_committed_save(tmp_path, "last", old.save_id) as (directory, manifest):
        assert manifest.save_id == old.save_id
        assert set(directory.shards()) == set(old.shards)
    with pytest.raises(ObjectMissing), open_committed_save(tmp_path, "last", new.save_id):
        pass


def test_the_place_of_a_staged_save_is_read_from_its_intent(tmp_path: Path) -> None:
    """The place that a rank noted in the intent is read. Torn or invalid lines are ignored, and an abort removes the
    note.
    """
    store = LocalStore(tmp_path)
    manifest = open_save(store, 3)
    good = {"lineage": RUN, "sequence": 1}
    torn = [json.dumps(good)[:-3], "", "[]", "\0\0\0"]
    bad = [*torn, *(json.dumps(good | part) for part in ({"lineage": "x"}, {"sequence": -1}))]
    with store.intent_path(manifest.save_id).open("ab") as intent, store.lock_save(manifest.save_id):
        for raw in (
            b"\n",
            b"[]\n",
            b"\0\0\0\n",
            json.dumps(good).encode()[:-3] + b"\n",
            *(f"{one}\n".encode() for one in bad),
        ):
            intent.write(raw)
            intent.flush()
            assert store.read_places() == {}
            assert store.intent_of(manifest.save_id).checkpoint_id == manifest.checkpoint_id
        store.note_place(manifest.save_id, RUN, 41)
        assert store.is_locked(manifest.save_id), "its ranks still lock the same file"
    assert replace(store.read_places()[manifest.save_id], created_unix_s=0.0).order == (41, 0.0, manifest.save_id)
    store.abort(manifest.save_id)
    assert store.read_places() == {}


def test_a_version_that_is_read_is_not_removed(tmp_path: Path) -> None:
    """A newer save, `drop_replaced` and `retire` do not remove a version that a load has locked. After the release,
    `drop_replaced` does.
    """
    store = LocalStore(tmp_path / "root")
    old = open_save(store, 1)
    store.commit(old.save_id)
    reading = lock_version(store.catalog, "last", old.save_id)
    assert reading is not None
    assert not retire(store.root, "last", old.save_id)
    new = open_save(store, 2)
    store.commit(new.save_id)
    assert published(store) == new.save_id
    assert not store.drop_replaced("last", old.save_id)
    assert not retire(store.root, "last", old.save_id)
    for name in (HERE, ELSEWHERE):
        assert read(store, old, name).startswith(f"1{numbered(name, 1)}".encode())
    reading.release()
    assert store.drop_replaced("last", old.save_id)
    with pytest.raises(ObjectMissing):
        read(store, old, HERE)


def test_a_replacement_may_be_replaced_while_a_load_reads(tmp_path: Path) -> None:
    """Two overwrites during a load: the locked version stays readable, and the version between is removed at once."""
    store = LocalStore(tmp_path / "root")
    manifests = [open_save(store, 1)]
    store.commit(manifests[0].save_id)
    reading = lock_version(store.catalog, "last", manifests[0].save_id)
    assert reading is not None
    for number in (2, 3):
        manifests.append(open_save(store, number))
        store.commit(manifests[-1].save_id)
    assert read(store, manifests[0], HERE)
    assert replaced_in(store) == [manifests[0].save_id]
    reading.release()


def test_pins_of_a_collected_service_lock_no_version(tmp_path: Path) -> None:
    """A service that is garbage-collected releases its locks, even if its process goes on."""
    service = NodeService(LocalStore(tmp_path))
    old = open_save(service.store, 1)
    service.commit(old.save_id)
    service.pin(old.save_id, "session/0")
    assert not retire(tmp_path, "last", old.save_id)
    del service
    gc.collect()
    assert retire(tmp_path, "last", old.save_id)


def test_a_version_that_a_retired_save_replaced_does_not_come_back(tmp_path: Path) -> None:
    """A load reads another run's replaced version: that version and its replacement stay until the load ends. Then both
    are removed.
    """
    service = NodeService(LocalStore(tmp_path))
    store = service.store
    theirs = open_save(store, 7, OTHER)
    store.commit(theirs.save_id)
    reading = lock_version(store.catalog, "last", theirs.save_id)
    assert reading is not None
    ours = open_save(store, 1)
    newest = open_save(store, 2, checkpoint_id="newest")
    store.commit(ours.save_id)
    store.commit(newest.save_id)
    service.policies.learn([Policy("", NODES, 1, Retention(keep_last=1), lineage=RUN)])
    collector = Collector(service, threading.Event())

    def look_after() -> list[str]:
        manifests = {each.save_id: each for _, each in store.catalog.committed()}
        manifests |= {each.save_id: each for _, each in store.catalog.read_replaced()}
        view = NodeView(service.node_id, Presence.UP, store.catalog.holdings(service.node_id))
        drop_superseded(service, manifests, [view])
        view = replace(view, holdings=store.catalog.holdings(service.node_id))
        going, _ = collector.retire(manifests, [view], service.policies.read_all(), in_doubt=False)
        return [save_id for save_id in manifests if save_id not in going]

    assert look_after() == [ours.save_id, newest.save_id, theirs.save_id]
    assert read(store, theirs, HERE)
    assert published(store) == ours.save_id
    reading.release()
    assert ours.save_id not in look_after()
    assert [each.save_id for each in store.catalog.holdings("n")] == [newest.save_id]


def test_a_late_commit_returns_its_own_shards_on_this_node(tmp_path: Path) -> None:
    """A commit of a replaced version returns that version's shards on this node, not the newer version's."""
    store = LocalStore(tmp_path)
    old = open_save(store, 1, is_whole=False)
    assert store.commit(old.save_id) == (numbered(HERE, 1),)
    lock = lock_version(store.catalog, "last", old.save_id)
    assert lock is not None
    newer = open_save(store, 2)
    assert store.commit(newer.save_id) == (numbered(HERE, 2), numbered(ELSEWHERE, 2))
    assert store.commit(old.save_id) == (numbered(HERE, 1),)
    lock.release()


@pytest.mark.parametrize("footer", ["of other bytes", "damaged"])
def test_a_shard_with_other_bytes_than_the_manifest_has_is_not_published(tmp_path: Path, footer: str) -> None:
    """A shard that contradicts its manifest is quarantined, the rest is published, and the replaced version stays. A
    shard with only a damaged footer is published.
    """
    store = LocalStore(tmp_path)
    before = open_save(store, 1)
    store.commit(before.save_id)
    newer = open_save(store, 2)
    here, elsewhere = numbered(HERE, 2), numbered(ELSEWHERE, 2)
    path = store.path_of_staged(newer.save_id, elsewhere)
    other = b"evil" * (len(path.read_bytes()) // 4)
    raw = other + table_of([other]).encode() if footer == "of other bytes" else path.read_bytes()[:-1]
    path.write_bytes(raw)
    is_dropped = footer == "of other bytes"
    assert store.commit(newer.save_id) == ((here,) if is_dropped else (here, elsewhere))
    assert published(store) == newer.save_id
    assert (tmp_path / "last" / elsewhere).exists() is not is_dropped
    aside = list((tmp_path / ".quarantine" / newer.save_id).glob("*")) if is_dropped else []
    assert [entry.read_bytes() for entry in aside] == [raw] * is_dropped
    assert read(store, before, ELSEWHERE), "the newer version is incomplete here, so the replaced one stays"
