"""Hard links: two saves share a shard, and the removal of one changes no byte of the other."""

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
    """Commits a checkpoint with one shard."""
    return shard_of(checkpointed([store], number, {"__0_0.distcp": (0,)}, checkpoint_id=checkpoint_id))


def shard_of(manifest: Manifest) -> CommittedShard:
    ((name, entry),) = manifest.shards.items()
    return CommittedShard(manifest.checkpoint_id, manifest.save_id, name, entry.size_bytes, entry.crc32c)


def opened(store: LocalStore) -> Path:
    """Opens a save. Returns the path of its shard."""
    store.begin(Intent(SAVE, "step-9", "session", overwrite=False))
    return store.path_of_staged(SAVE, NAME)


def link(store: LocalStore, source: CommittedShard) -> None:
    store.link_staged(SAVE, NAME, source, DamageBook(store).has_file)


def path_of(store: LocalStore, source: CommittedShard) -> Path:
    return store.root / source.checkpoint_id / source.name


def test_a_link_is_the_same_file(store: LocalStore) -> None:
    """The staged path is a hard link to the committed shard."""
    source, path = saved(store), opened(store)
    link(store, source)
    assert os.path.samestat(path.stat(), path_of(store, source).stat())
    assert not findings(store)


@pytest.mark.parametrize("remove", [recycle, retire])
def test_a_removed_source_leaves_the_link_as_it_was(
    store: LocalStore, remove: Callable[[Path, str, str], bool]
) -> None:
    """After the source is retired or recycled, the link has its bytes. A file with a second name is not recycled."""
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
    """Flips a byte, and marks the shard as the scrub does."""
    flip(path_of(store, source), 1000)
    store.agent_directory()
    DamageBook(store).mark(source.checkpoint_id, source.save_id, source.name)


def quarantine(store: LocalStore, source: CommittedShard) -> None:
    path_of(store, source).rename(store.root / "elsewhere")


def retire_it(store: LocalStore, source: CommittedShard) -> None:
    retire(store.root, source.checkpoint_id, source.save_id)


def save_again(store: LocalStore, source: CommittedShard) -> None:
    """Another save replaces the checkpoint and its shard under the same names."""
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
def test_a_damaged_or_replaced_source_is_not_linked(store: LocalStore, change: object, error: type[Exception]) -> None:
    """A damaged, missing or replaced source raises, and leaves no link: the save then writes the shard."""
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
    """Fields of a peer's request that become parts of a path are validated."""
    right = CommittedShard("run/step-1", "1" * 32, "__0_3.distcp", 5, 6)
    assert CommittedShard.from_json(right.to_json()) == right
    with pytest.raises((ValueError, TypeError)):
        CommittedShard.from_json({**right.to_json(), **wrong})
