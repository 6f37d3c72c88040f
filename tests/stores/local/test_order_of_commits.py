"""Publishing compares what is published, on every path; what is replaced is kept until it may go."""

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


def named(name: str, number: int) -> str:
    """The shard of the same rank of the save of this number."""
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
    """Stages and decides a save; its second shard lies here only if `is_whole`. `number` is in the names of its files."""
    names = [named(name, number) for name in (HERE, ELSEWHERE)]
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
    name = named(name, manifest.sequence)
    with open(store.open_file("last", manifest.save_id, name), "rb") as file:  # noqa: PTH123 - a descriptor
        return file.read()


def test_a_save_replaces_nothing_that_was_published_while_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `overwrite` the name was free when it was looked at: another run's save has it since, and keeps it."""
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
    """However late it comes: it was opened before, is decided, and stays staged."""
    store = LocalStore(tmp_path)
    old, new = open_save(store, 1), open_save(store, 2)
    store.commit(new.save_id)
    for _ in range(2):
        with pytest.raises(SaveSuperseded, match=new.save_id):
            store.commit(old.save_id)
    assert published(store) == new.save_id
    assert [intent.save_id for intent in store.list_staged()] == [old.save_id]


def test_another_run_is_replaced_only_where_the_user_saw_it(tmp_path: Path) -> None:
    """A save of another lineage takes the name from the version that lay there when it was opened, and from no other."""
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
    """While the new one is not whole here both are holdings of their own saves; a drop leaves the new one alone."""
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
    assert set(held[new.save_id].sizes) == {named(HERE, 2)}
    store.drop_replaced("last", old.save_id)
    with pytest.raises(ObjectMissing):
        read(store, old, HERE)
    assert read(store, new, HERE)
    assert files_in(store) == {named(HERE, 2)}


def test_what_is_whole_here_waits_for_no_other_node(tmp_path: Path) -> None:
    """All shards lie on this disk: the version that was replaced goes at once, as on one node or on two."""
    store = LocalStore(tmp_path)
    store.commit(open_save(store, 1).save_id)
    store.commit(open_save(store, 2).save_id)
    assert replaced_in(store) == []


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("point", ["commit.described", "commit.prepared", "commit.named", "commit.durable"])
def test_a_crash_while_it_is_published_keeps_both_versions(tmp_path: Path, point: str) -> None:
    """After the restart the new one has the name and the old one is kept, wherever the crash has left it."""
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
    """A store, the whole version that it keeps, and the newer one that has its name and not all shards."""
    store = LocalStore(root)
    old = open_save(store, 1)
    store.commit(old.save_id)
    new = open_save(store, 2, is_whole=False)
    store.commit(new.save_id)
    return store, old, new


def test_a_version_that_comes_back_has_its_shards_back(tmp_path: Path) -> None:
    """A replaced version that is published again, as the newer one was removed, is not there twice."""
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
    """One that the policy gives up goes, too, and the published one stays."""
    store, old, new = replace_by_half(tmp_path)
    assert retire(tmp_path, "last", old.save_id)
    assert replaced_in(store) == []
    assert published(store) == new.save_id


def test_a_replaced_version_is_found_where_nothing_has_its_name(tmp_path: Path) -> None:
    """The newer one was retired, and a load or a repair reads and mends the older one as any other."""
    store, old, new = replace_by_half(tmp_path)
    assert retire(tmp_path, "last", new.save_id)
    assert list(store.catalog.committed()) == []
    with open_committed_save(tmp_path, "last", old.save_id) as (directory, manifest):
        assert manifest.save_id == old.save_id
        assert set(directory.shards()) == set(old.shards)
    with pytest.raises(ObjectMissing), open_committed_save(tmp_path, "last", new.save_id):
        pass


def test_the_place_of_a_staged_save_is_known_to_the_next(tmp_path: Path) -> None:
    """What a rank has noted counts; a torn or foreign note counts for nothing, and goes with its save."""
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
    """Not by a newer save that is whole here, not by what drops replaced versions, not by a policy; afterwards it goes."""
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
        assert read(store, old, name).startswith(f"1{named(name, 1)}".encode())
    reading.release()
    assert store.drop_replaced("last", old.save_id)
    with pytest.raises(ObjectMissing):
        read(store, old, HERE)


def test_what_replaces_it_may_be_replaced_in_turn(tmp_path: Path) -> None:
    """Two newer saves while a load reads: each version is where a reader finds it, and the one between goes at once."""
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


def test_pins_that_are_gone_hold_no_version(tmp_path: Path) -> None:
    """Of a service that is dropped without an end, its locks go, too: its process may live on."""
    service = NodeService(LocalStore(tmp_path))
    old = open_save(service.store, 1)
    service.commit(old.save_id)
    service.pin(old.save_id, "session/0")
    assert not retire(tmp_path, "last", old.save_id)
    del service
    gc.collect()
    assert retire(tmp_path, "last", old.save_id)


def test_what_a_retired_save_had_replaced_is_no_checkpoint_again(tmp_path: Path) -> None:
    """Another run's, that is read meanwhile: it stays for that, as does the save that has its name; then both go."""
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


def test_a_late_commit_tells_what_lies_here_of_its_own_save(tmp_path: Path) -> None:
    """A load has published it, and a newer save has its name by now, while it is read: the newer one's shards are none."""
    store = LocalStore(tmp_path)
    old = open_save(store, 1, is_whole=False)
    assert store.commit(old.save_id) == (named(HERE, 1),)
    lock = lock_version(store.catalog, "last", old.save_id)
    assert lock is not None
    newer = open_save(store, 2)
    assert store.commit(newer.save_id) == (named(HERE, 2), named(ELSEWHERE, 2))
    assert store.commit(old.save_id) == (named(HERE, 1),)
    lock.release()


@pytest.mark.parametrize("footer", ["of other bytes", "damaged"])
def test_a_shard_with_other_bytes_than_the_manifest_has_is_not_published(tmp_path: Path, footer: str) -> None:
    """It is set aside, this node lacks that copy, the rest is published, and what the save replaced stays. A damaged footer
    says nothing of the data: that shard is published, and mended."""
    store = LocalStore(tmp_path)
    before = open_save(store, 1)
    store.commit(before.save_id)
    newer = open_save(store, 2)
    here, elsewhere = named(HERE, 2), named(ELSEWHERE, 2)
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
    assert read(store, before, ELSEWHERE), "its copy of the newer one is not whole"
