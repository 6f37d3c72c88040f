"""State files of an agent: concurrent updates, a full disk and restarts lose no entry."""

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.errors import StoreError, StoreFull
from replicated_ckpt.node.peers import address_book
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.node.state.sequence_floor import SequenceFloor
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.journal import End, Journal
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.checkpoints import checkpointed, shard

SAVE = "1" * 32
Book = UploadBook | SequenceFloor | PolicyBook
POLICY = Policy("", NODES, 1, Retention(keep_last=1), lineage="")


def target(url: str) -> ObjectTarget:
    return ObjectTarget.check_supported(url, None)


def test_many_threads_name_buckets_at_once(tmp_path: Path) -> None:
    """Buckets are added by many threads at once: none fails, and a restarted agent reads all of them."""
    book = UploadBook(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(book.learn, [target(f"s3://bucket-{number}/run") for number in range(40)]))
    assert sorted(UploadBook(tmp_path).read_urls()) == sorted(book.read_urls())
    assert len(book.read_urls()) == 40


def test_a_bucket_that_is_named_again_is_not_evicted(tmp_path: Path) -> None:
    """A full book evicts the buckets that were named least recently. A bucket that every save names stays."""
    book = UploadBook(tmp_path)
    for number in range(100):
        book.learn(target("s3://of-the-run/here"))
        book.learn(target(f"s3://of-others/{number}"))
        assert "s3://of-the-run/here" in book.read_urls()
    assert UploadBook(tmp_path).read_urls() == book.read_urls()
    assert len(book.read_urls()) == 64


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Writes of state files raise ENOSPC until the returned function is called."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("replicated_ckpt.node.state.state_file.write_file", refuse)
    return monkeypatch.undo


@pytest.mark.parametrize("is_order", [False, True])
@pytest.mark.parametrize("make", [UploadBook, SequenceFloor, PolicyBook])
def test_an_update_that_a_full_disk_refused_is_written_when_repeated(
    tmp_path: Path, full_disk: Callable[[], None], make: Callable[[Path], Book], *, is_order: bool
) -> None:
    """An update that a full disk refused is written when the same update is repeated.

    The update of sequences raises nothing, because an error would stop re-protection, which frees the disk.
    """
    book = make(tmp_path)

    def update() -> None:
        match book:
            case UploadBook() if is_order:
                book.order(SAVE, "s3://a/run")
            case UploadBook():
                book.learn(target("s3://a/run"))
            case SequenceFloor():
                book.raise_to({"": 7}, {}, "peer")
            case PolicyBook():
                book.learn([POLICY])

    def read_again() -> object:
        again = make(tmp_path)
        if isinstance(again, UploadBook):
            return again.is_ordered(SAVE) if is_order else again.read_urls()
        return again.read_all()

    with nullcontext() if isinstance(book, SequenceFloor) else pytest.raises(StoreFull):
        update()
    assert not read_again()
    assert not (isinstance(book, UploadBook) and book.is_ordered(SAVE)), "a refused order is not carried out"
    full_disk()
    update()
    assert read_again()


def test_a_mark_set_during_a_check_of_the_same_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file is replaced by another damaged one, and marked while the book checks it: the mark stays."""
    store = LocalStore(tmp_path)
    store.agent_directory()
    key = "step-1", checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000).save_id, shard(0)
    book, path = DamageBook(store), store.path_of("step-1", SAVE, shard(0))
    book.mark(*key)
    path.write_bytes(path.read_bytes()[:-1])
    look = DamageBook._look

    def mark_meanwhile(self: DamageBook, at: tuple[str, str, str]) -> object:
        monkeypatch.setattr(DamageBook, "_look", look)
        self.mark(*key)
        return look(self, at)

    monkeypatch.setattr(DamageBook, "_look", mark_meanwhile)
    assert book.is_known(*key)
    assert DamageBook(store).is_known(*key)


def test_a_removal_that_was_refused_is_not_made_by_the_next_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync fails after the journal has the removal, so the user gets an error: the next agent does not remove the
    checkpoint.
    """
    LocalStore(tmp_path).agent_directory()
    journal = Journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse_to_open)
        with pytest.raises(StoreError):
            journal.append_end(SAVE, End.REMOVING)
    assert SAVE.encode() in (tmp_path / ".agent" / "journal").read_bytes(), "the journal has the removal"
    for each in (journal, Journal(tmp_path)):
        assert each.read_removals() == (frozenset(), frozenset())
    journal.append_end(SAVE, End.REMOVING)
    assert Journal(tmp_path).read_removals() == (frozenset({SAVE}), frozenset())


def test_a_full_address_book_keeps_the_nodes_that_were_met_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full address book evicts the nodes that were met least recently. A node that was met first and again last
    stays.
    """
    monkeypatch.setattr(address_book, "_PEERS_MAX", 3)
    book = PeerBook(LocalStore(tmp_path).agent_directory())
    for nodes in (["first"], ["gone-1"], ["gone-2"], ["first", "new"]):
        book.learn([AgentAddress(node, "127.0.0.1", 1, "token") for node in nodes])
    assert {peer.node_id for peer in book.read_all()} == {"first", "new", "gone-2"}


def test_a_damage_mark_stays_while_the_file_cannot_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted agent has no descriptors to check a damaged file. The file stays marked, or the checkpoint would
    count as intact.
    """
    store = LocalStore(tmp_path)
    manifest = checkpointed([store], 1, {shard(0): [0]}, copies=1)
    store.agent_directory()
    DamageBook(store).mark("step-1", manifest.save_id, shard(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_to_open)
        restarted = DamageBook(LocalStore(tmp_path))
        assert restarted.mark_damaged([]) == ()
        assert restarted.is_known("step-1", manifest.save_id, shard(0))
    assert DamageBook(LocalStore(tmp_path)).is_known("step-1", manifest.save_id, shard(0))
    (store.root / "step-1" / shard(0)).write_bytes(b"another")
    assert not restarted.is_known("step-1", manifest.save_id, shard(0))


def refuse_to_open(path: object, *_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files", path)


def test_an_invalid_target_does_not_hide_the_others(tmp_path: Path) -> None:
    """A state file of an earlier release has a target that is invalid now. The other targets, with their credentials,
    are read.
    """
    UploadBook(tmp_path).learn(ObjectTarget.from_json({"url": "s3://b/x", "options": {"key": "k"}}))
    path = tmp_path / "uploads.json"
    document = json.loads(path.read_text())
    document["targets"].insert(0, {"url": "file://scratch/x", "options": {}})
    path.write_text(json.dumps(document))
    assert UploadBook(tmp_path).read_urls() == ("s3://b/x",)
