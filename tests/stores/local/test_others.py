"""What lies in a checkpoint's directory and is not ours outlives every version of it, whatever is killed when."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.settling.settle import settle
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files import renames
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions import others as versions_others
from replicated_ckpt.stores.local.versions.replaced import lock_version
from replicated_ckpt.stores.local.versions.retire import retire
from tests.killed import killed_at
from tests.stores.local.test_local import SHARD, content, save_id, staged

COMMITTING = [
    "commit.checked",
    "commit.staging-fsynced",
    "commit.replaced",
    "commit.named",
    "commit.durable",
    "commit.done",
]
EXCHANGES = pytest.mark.parametrize("can_exchange", [True, False])


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def put_others(directory: Path) -> Mapping[str, str]:
    """A tokenizer, a configuration and a link, as a user puts them beside a checkpoint's files."""
    (directory / "tokenizer" / "more").mkdir(parents=True)
    (directory / "tokenizer" / "more" / "vocab.txt").write_text("words")
    (directory / "config.json").write_text("{}")
    (directory / "README").symlink_to("config.json")
    return others(directory)


def others(directory: Path) -> Mapping[str, str]:
    """What lies there and is not ours, by its path there."""
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if not path.is_dir()}
    return {name: path.read_text() for name, path in found.items() if name[0] not in "._"}


def overwritten(store: LocalStore, number: int, data: bytes) -> str:
    return staged(store, number, data, overwrite=True)


def cannot_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "exchange", lambda *_: False)


def started(store: LocalStore) -> LocalStore:
    """The store after the next start of its agent, and the settling of what was left."""
    service = NodeService(store)
    service.recover()
    store.empty_trash()
    settle(service, service.leftovers(), ())
    assert store.list_staged() == ()
    assert not any((store.root / ".trash").glob("*"))
    return store


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_directory_that_is_there_is_saved_into(store: LocalStore, is_empty: bool) -> None:
    """An empty directory, or one with others' files, is no checkpoint: without `overwrite` it becomes one, with them."""
    folder = store.root / "step-1"
    folder.mkdir()
    before = {} if is_empty else put_others(folder)
    store.commit(staged(store, 1, b"data"))
    assert content(store) == b"data"
    assert others(folder) == before


@EXCHANGES
def test_an_overwrite_keeps_what_is_not_ours(
    store: LocalStore, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice over: also a file that the user has changed or added in between; and none comes back that the user removed."""
    if not can_exchange:
        cannot_exchange(monkeypatch)
    store.commit(staged(store, 1, b"old"))
    folder = store.root / "step-1"
    put_others(folder)
    store.commit(overwritten(store, 2, b"new"))
    (folder / "config.json").write_text("changed")
    (folder / "added").write_text("later")
    (folder / "tokenizer" / "more" / "vocab.txt").unlink()
    before = others(folder)
    store.commit(overwritten(store, 3, b"newest"))
    assert content(store) == b"newest"
    assert others(folder) == before
    assert not (store.root / ".quarantine").exists()


@EXCHANGES
@pytest.mark.parametrize("is_checkpoint", [True, False])
@pytest.mark.parametrize("point", COMMITTING)
def test_an_overwrite_that_is_killed_keeps_what_is_not_ours(
    store: LocalStore, point: str, is_checkpoint: bool, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any step, after the next start all of it lies beside the new version's files."""
    if not can_exchange:
        cannot_exchange(monkeypatch)
    folder = store.root / "step-1"
    folder.mkdir()
    before = put_others(folder)
    if is_checkpoint:
        store.commit(staged(store, 1, b"old"))
    name = overwritten(store, 2, b"new")
    killed_at(point, lambda: store.commit(name))
    started(store)
    assert content(store) == b"new"
    assert others(folder) == before


def test_directories_that_a_crash_left_with_a_kept_version_come_back(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old version is kept, as a load reads it; it has gone to its place, and the process ends before they follow."""
    store.commit(staged(store, 1, b"old"))
    before = put_others(store.root / "step-1")
    name = overwritten(store, 2, b"new")
    reader = lock_version(store.catalog, "step-1", save_id(1))
    with monkeypatch.context() as patched:
        patched.setattr(versions_others, "move_others", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.commit(name)
    assert others(store.root / "step-1") != before
    started(store)
    assert content(store) == b"new"
    assert others(store.root / "step-1") == before
    assert store.catalog.is_replaced(save_id(1))
    assert reader is not None


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_cannot_have_a_second_name_is_moved(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links others' files go along all the same."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    store.commit(staged(store, 1, b"old"))
    before = put_others(store.root / "step-1")
    monkeypatch.setattr(os, "link", refuse)
    store.commit(overwritten(store, 2, b"new"))
    assert others(store.root / "step-1") == before


def test_of_two_files_of_one_name_both_are_kept(store: LocalStore) -> None:
    """What a user writes anew while the old one is on its way keeps the name; the old one lies in the quarantine."""
    store.commit(staged(store, 1, b"old"))
    folder = store.root / "step-1"
    put_others(folder)
    name = overwritten(store, 2, b"new")
    killed_at("commit.replaced", lambda: store.commit(name))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "new").write_text("anew")
    started(store)
    assert others(folder) == {"config.json": "{}", "README": "{}", "tokenizer/new": "anew"}
    kept = [path.read_text() for path in (store.root / ".quarantine").rglob("vocab.txt")]
    assert kept == ["words"]


def test_an_abort_takes_nothing_along(store: LocalStore) -> None:
    """A decided save that is given up after it has linked what is not ours leaves that where it was, and nowhere else."""
    store.commit(staged(store, 1, b"old"))
    before = put_others(store.root / "step-1")
    name = overwritten(store, 2, b"new")
    killed_at("commit.staging-fsynced", lambda: store.commit(name))
    store.abort(name)
    assert content(store) == b"old"
    assert others(store.root / "step-1") == before
    assert not (store.root / ".quarantine").exists()


@pytest.mark.parametrize("is_killed", [True, False])
def test_retention_leaves_what_is_not_ours(store: LocalStore, is_killed: bool) -> None:
    """A checkpoint that is retired leaves its directory with others' files, killed or not, and its name is free again."""
    name = staged(store, 1, b"old")
    store.commit(name)
    folder = store.root / "step-1"
    before = put_others(folder)
    if is_killed:
        killed_at("retire.trashed", lambda: retire(store.root, "step-1", name))
    else:
        assert retire(store.root, "step-1", name)
    started(store)
    assert others(folder) == before
    assert not (folder / SHARD).exists()
    assert list(store.catalog.committed()) == []
    store.commit(staged(store, 2, b"again"))
    assert (content(store), others(folder)) == (b"again", before)


def test_retention_leaves_no_empty_directory(store: LocalStore) -> None:
    """Where nothing of others lies, the directory goes."""
    name = staged(store, 1, b"old")
    store.commit(name)
    assert retire(store.root, "step-1", name)
    assert not (store.root / "step-1").exists()


def test_what_could_not_stay_is_refused_before_a_byte_is_written(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in the way that is mounted cannot move: the save is refused when it is opened, and names it."""
    mounted = store.root / "step-1" / "data"
    mounted.mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(mounted))
    with pytest.raises(ConfigInvalid, match=r"step-1/data cannot be moved"):
        store.begin(Intent(save_id(1), "step-1", "session", overwrite=False))


def test_a_file_in_the_way_is_refused(store: LocalStore) -> None:
    """A plain file, or a link to a directory, is no place for a checkpoint, and stays."""
    (store.root / "step-1").write_text("mine")
    (store.root / "folder").mkdir()
    (store.root / "step-2").symlink_to("folder")
    for taken, why in (("step-1", "is no directory"), ("step-2", "is a symbolic link")):
        with pytest.raises(ConfigInvalid, match=why):
            store.begin(Intent(save_id(1), taken, "session", overwrite=True))
    assert (store.root / "step-1").read_text() == "mine"


def test_a_link_to_a_checkpoint_is_not_saved_over(store: LocalStore) -> None:
    """It would be exchanged for the new directory, and what is not ours would leave the checkpoint that it leads to."""
    store.commit(staged(store, 1, b"old"))
    (store.root / "step-1" / "tokenizer").mkdir()
    (store.root / "best").symlink_to("step-1")
    with pytest.raises(ConfigInvalid, match="best is a symbolic link; it is not replaced"):
        store.begin(Intent(save_id(2), "best", "session", overwrite=True))
    assert (store.root / "best").readlink() == Path("step-1")
    assert (store.root / "step-1" / "tokenizer").is_dir()


def test_replaced_remains_of_a_checkpoint_are_kept_after_a_crash(store: LocalStore) -> None:
    """Shards without a manifest that a save replaces wait like any version until it is seen whole, killed or not."""
    store.commit(staged(store, 1, b"old"))
    for name in (".manifest.json", ".metadata"):
        (store.root / "step-1" / name).unlink()
    name = overwritten(store, 2, b"new")
    (store.staging(name) / SHARD).unlink()  # this node holds no shard of the new version
    killed_at("commit.replaced", lambda: store.commit(name))
    started(store)
    assert (store.root / ".replaced" / name / SHARD).exists()
