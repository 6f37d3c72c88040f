"""User files in a checkpoint's directory are never moved, linked or changed, whichever step is killed."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from replicated_ckpt.errors import ConfigInvalid, StoreDenied
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import retire
from tests.killed import killed_at
from tests.stores.local.test_local import NEXT_SHARD, SHARD, content, save_id, staged

COMMITTING = [
    "commit.checked",
    "commit.described",
    "commit.prepared",
    "commit.named",
    "commit.durable",
    "commit.done",
]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def put_user_files(directory: Path) -> Mapping[str, tuple[object, ...]]:
    """Puts user files beside a checkpoint's: a tokenizer, a configuration and a link. Returns `user_files`."""
    (directory / "tokenizer" / "more").mkdir(parents=True)
    (directory / "tokenizer" / "more" / "vocab.txt").write_text("words")
    (directory / "config.json").write_text("{}")
    (directory / "README").symlink_to("config.json")
    return user_files(directory)


def user_files(directory: Path) -> Mapping[str, tuple[object, ...]]:
    """Inode, link count and change times of each user file, by relative path."""
    found = {path.relative_to(directory).as_posix(): path.lstat() for path in directory.rglob("*")}
    return {
        name: (status.st_ino, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in found.items()
        if name[0] not in "._"
    }


def overwritten(store: LocalStore, number: int, data: bytes) -> str:
    return staged(store, number, data, overwrite=True)


def restarted(store: LocalStore) -> LocalStore:
    """The store after a restart of its agent, with stale saves settled."""
    service = NodeService(store)
    service.recover()
    store.tidy(is_alone=True)
    settle(service, service.list_stale_saves(), ())
    assert store.list_staged() == ()
    return store


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_save_into_an_existing_directory_keeps_its_files(store: LocalStore, is_empty: bool) -> None:
    """A save without `overwrite` into an existing directory without a checkpoint succeeds, and keeps its user files."""
    folder = store.root / "step-1"
    folder.mkdir()
    before = {} if is_empty else put_user_files(folder)
    store.commit(staged(store, 1, b"data"))
    assert content(store) == b"data"
    assert user_files(folder) == before


def test_an_overwrite_keeps_user_files(store: LocalStore) -> None:
    """Two overwrites keep user files, also those changed or added in between, and restore none that the user removed."""
    store.commit(staged(store, 1, b"old"))
    folder = store.root / "step-1"
    put_user_files(folder)
    store.commit(overwritten(store, 2, b"new"))
    (folder / "config.json").write_text("changed")
    (folder / "added").write_text("later")
    (folder / "tokenizer" / "more" / "vocab.txt").unlink()
    before = user_files(folder)
    store.commit(overwritten(store, 3, b"newest"))
    assert content(store) == b"newest"
    assert user_files(folder) == before
    assert not (store.root / ".quarantine").exists()


@pytest.mark.parametrize("is_checkpoint", [True, False])
@pytest.mark.parametrize("point", COMMITTING)
def test_an_overwrite_that_is_killed_keeps_user_files(store: LocalStore, point: str, is_checkpoint: bool) -> None:
    """An overwrite is killed at any step and the agent restarts: the user files are untouched beside the new version's."""
    folder = store.root / "step-1"
    folder.mkdir()
    before = put_user_files(folder)
    if is_checkpoint:
        store.commit(staged(store, 1, b"old"))
    name = overwritten(store, 2, b"new")
    killed_at(point, lambda: store.commit(name))
    restarted(store)
    assert content(store) == b"new"
    assert user_files(folder) == before
    ours = {path.name for path in folder.iterdir()} - before.keys()
    assert ours == {*store.catalog.look("step-1").shards, ".metadata", ".manifest.json"}
    assert len(store.catalog.look("step-1").shards) == 1


@pytest.mark.parametrize("point", [None, "retire.gone", "retire.recycled"])
def test_retention_keeps_user_files(store: LocalStore, point: str | None) -> None:
    """Retention, killed or not, leaves the user files, and the id can be saved again."""
    name = staged(store, 1, b"old")
    store.commit(name)
    folder = store.root / "step-1"
    before = put_user_files(folder)
    if point is not None:
        killed_at(point, lambda: retire(store.root, "step-1", name))
        assert list(store.catalog.committed()) == []
    else:
        assert retire(store.root, "step-1", name)
    restarted(store)
    assert user_files(folder) == before
    assert {path.name for path in folder.iterdir()} == {"tokenizer", "config.json", "README"}
    assert list(store.catalog.committed()) == []
    store.commit(staged(store, 2, b"again"))
    assert (content(store), user_files(folder)) == (b"again", before)


def test_retention_leaves_no_empty_directory(store: LocalStore) -> None:
    """Without user files, retention removes the directory."""
    name = staged(store, 1, b"old")
    store.commit(name)
    assert retire(store.root, "step-1", name)
    assert not (store.root / "step-1").exists()


def test_a_checkpoint_may_lie_in_the_directory_of_another(store: LocalStore) -> None:
    """Nested checkpoints are overwritten and retired independently."""
    ids = ("step-1", "step-1/ema", "step-1/ema/best")
    names = {name: staged(store, at, name.encode(), checkpoint_id=name) for at, name in enumerate(ids, 1)}
    for name in (ids[1], ids[0], ids[2]):
        store.commit(names[name])
    assert sorted(name for name, _ in store.catalog.committed()) == sorted(ids)
    again = staged(store, 7, b"again", overwrite=True)
    store.commit(again)
    assert [content(store, name) for name in ids] == [b"again", b"step-1/ema", b"step-1/ema/best"]
    assert retire(store.root, "step-1", again)
    assert retire(store.root, ids[2], names[ids[2]])
    assert [name for name, _ in store.catalog.committed()] == ["step-1/ema"]
    assert content(store, "step-1/ema") == b"step-1/ema"


def test_a_directory_without_access_does_not_stop_a_save(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subdirectory without access, such as a mount, does not stop a save."""
    closed = store.root / "step-1" / "data"
    closed.mkdir(parents=True)
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *more, **named: str(path) != str(closed) and real(path, *more, **named)
    )
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    store.commit(staged(store, 1, b"data"))
    assert content(store) == b"data"


def test_a_directory_that_may_not_be_written_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the directory cannot be written, the commit raises, and the decided save stays staged for a retry."""
    store.commit(staged(store, 1, b"old"))
    name = overwritten(store, 2, b"new")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.parent.name == "step-1":
            raise PermissionError(13, "Permission denied", str(path), None, str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StoreDenied, match="commit"):
        store.commit(name)
    monkeypatch.undo()
    assert store.is_decided(name)
    store.commit(name)
    assert content(store) == b"new"


def test_a_file_in_the_way_is_refused(store: LocalStore) -> None:
    """A plain file or a link in place of the directory is refused, and stays."""
    (store.root / "step-1").write_text("mine")
    (store.root / "folder").mkdir()
    (store.root / "step-2").symlink_to("folder")
    for taken, why in (("step-1", "is not a directory"), ("step-2", "is a symbolic link")):
        with pytest.raises(ConfigInvalid, match=why):
            store.begin(Intent(save_id(1), taken, "session", overwrite=True))
    assert (store.root / "step-1").read_text() == "mine"


def test_a_link_to_a_checkpoint_is_not_saved_over(store: LocalStore) -> None:
    """A save under the name of a link to a checkpoint is refused."""
    store.commit(staged(store, 1, b"old"))
    (store.root / "best").symlink_to("step-1")
    with pytest.raises(ConfigInvalid, match="best is a symbolic link; it is not replaced"):
        store.begin(Intent(save_id(2), "best", "session", overwrite=True))
    assert content(store) == b"old"


def test_an_incomplete_overwrite_keeps_shards_without_a_manifest(store: LocalStore) -> None:
    """An overwrite keeps shards without a manifest while it is incomplete, because another node may have their
    manifest.
    """
    store.commit(staged(store, 1, b"old"))
    for name in (".manifest.json", ".metadata"):
        (store.root / "step-1" / name).unlink()
    old = (store.root / "step-1" / SHARD).read_bytes()
    name = overwritten(store, 2, b"new")
    (store.staging(name) / NEXT_SHARD).unlink()  # no shard of the save is on this node
    killed_at("commit.prepared", lambda: store.commit(name))
    restarted(store)
    assert (store.root / "step-1" / SHARD).read_bytes() == old
