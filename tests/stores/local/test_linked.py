"""Links: a shard of a committed save is a shard of the next one, and either may go without a byte of the other changing."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from replicated_ckpt.core.layout import RECYCLED_DIR
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, ReplicatedCkptError, StoreError
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import CommittedShard
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.local.versions.remove import recycle, retire
from tests.agent.checkpoints import checkpointed, findings

SAVE = "e" * 32
NAME = "__0_3.distcp"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "node")


def saved(store: LocalStore, checkpoint_id: str = "step-1", number: int = 1) -> CommittedShard:
    """A committed checkpoint with one shard."""
    return shard_of(checkpointed([store], number, {"__0_0.distcp": (0,)}, checkpoint_id=checkpoint_id))


def shard_of(manifest: Manifest) -> CommittedShard:
    ((name, entry),) = manifest.shards.items()
    return CommittedShard(manifest.checkpoint_id, manifest.save_id, name, entry.size_bytes, entry.crc32c)


def opened(store: LocalStore) -> Path:
    """Opens a save; where its shard will lie."""
    store.begin(Intent(SAVE, "step-9", "session", overwrite=False))
    return store.path_of_staged(SAVE, NAME)


def link(store: LocalStore, source: CommittedShard) -> None:
    store.link_staged(SAVE, NAME, source, DamageBook(store).has_file)


def path_of(store: LocalStore, source: CommittedShard) -> Path:
    return store.root / source.checkpoint_id / source.name


def test_a_link_is_the_same_file(store: LocalStore) -> None:
    """No byte is written; the name is the staged one."""
    source, path = saved(store), opened(store)
    link(store, source)
    assert os.path.samestat(path.stat(), path_of(store, source).stat())
    assert not findings(store)


@pytest.mark.parametrize("remove", [recycle, retire])
def test_a_removed_source_leaves_the_link_as_it_was(
    store: LocalStore, remove: Callable[[Path, str, str], bool]
) -> None:
    """Also where its files are recycled: what has a second name is never written over."""
    source, path = saved(store), opened(store)
    before = path_of(store, source).read_bytes()
    link(store, source)
    assert remove(store.root, source.checkpoint_id, source.save_id)
    assert not list((store.root / RECYCLED_DIR).glob("*"))
    assert RecycledFiles(store.root).take_file(path.with_name("other.part"), source.name) is None
    assert path.read_bytes() == before


def test_an_aborted_save_leaves_the_source_as_it_was(store: LocalStore) -> None:
    source, path = saved(store), opened(store)
    before = path_of(store, source).read_bytes()
    link(store, source)
    store.abort(SAVE, "for the test")
    assert not path.exists()
    assert path_of(store, source).read_bytes() == before
    assert not findings(store)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def damage_footer(store: LocalStore, source: CommittedShard) -> None:
    flip(path_of(store, source), -2)


def truncate(store: LocalStore, source: CommittedShard) -> None:
    os.truncate(path_of(store, source), source.size_bytes - 4096)


def mark(store: LocalStore, source: CommittedShard) -> None:
    """The scrub has found a flipped byte."""
    flip(path_of(store, source), 1000)
    store.agent_directory()
    DamageBook(store).mark(source.checkpoint_id, source.save_id, source.name)


def quarantine(store: LocalStore, source: CommittedShard) -> None:
    path_of(store, source).rename(store.root / "elsewhere")


def retire_it(store: LocalStore, source: CommittedShard) -> None:
    retire(store.root, source.checkpoint_id, source.save_id)


def save_again(store: LocalStore, source: CommittedShard) -> None:
    """Another save has the name of the checkpoint and of its shard."""
    retire_it(store, source)
    saved(store, source.checkpoint_id, 2)


def take_the_name(store: LocalStore, source: CommittedShard) -> None:
    store.path_of_staged(SAVE, NAME).write_bytes(b"something")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damage_footer, ObjectCorrupt),
        (truncate, ObjectCorrupt),
        (mark, ObjectCorrupt),
        (quarantine, ObjectMissing),
        (retire_it, ObjectMissing),
        (save_again, ObjectMissing),
        (take_the_name, StoreError),
    ],
)
def test_what_is_not_the_intact_shard_is_not_linked(store: LocalStore, change: object, error: type[Exception]) -> None:
    """The save writes the shard then: it gets an error of ours, and nothing new has the name."""
    source, path = saved(store), opened(store)
    assert callable(change)
    change(store, source)
    with pytest.raises(error):
        link(store, source)
    assert not path.exists() or path.read_bytes() == b"something"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOSPC])
def test_a_file_system_that_makes_no_link_is_an_error_of_ours(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    source, path = saved(store), opened(store)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ReplicatedCkptError):
        link(store, source)
    assert not path.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"checkpoint_id": "../step-1"},
        {"checkpoint_id": ["step-1"]},
        {"save_id": "../" + "1" * 29},
        {"name": "../../node.json"},
        {"name": ".manifest.json"},
        {"size_bytes": None},
    ],
)
def test_fields_that_name_no_shard_are_refused(wrong: dict[str, object]) -> None:
    """They come from a peer, and become parts of a path."""
    right = CommittedShard("run/step-1", "1" * 32, "__0_3.distcp", 5, 6)
    assert CommittedShard.from_json(right.to_json()) == right
    with pytest.raises((ValueError, TypeError)):
        CommittedShard.from_json({**right.to_json(), **wrong})
