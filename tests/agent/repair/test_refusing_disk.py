"""Disk errors during upkeep: the rest of the upkeep goes on, and no work is repeated in vain."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicated_ckpt.agent.repair import mender as mending
from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.repair.scrub import Scrubber
from replicated_ckpt.core.layout import MANIFEST_NAME, replaced_name
from replicated_ckpt.core.upkeep.repair_plan import CopyShard
from replicated_ckpt.errors import StoreDenied, StoreError, StoreFull
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import follow_stale_save
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import Submissions, SubmittedShard
from replicated_ckpt.stores.files.room import Room
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.journal import End
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import retire
from replicated_ckpt.stores.throttle import Pace
from tests.agent.checkpoints import checkpointed, findings, quarantined, shard
from tests.agent.collecting import drop_superseded
from tests.stores.files.test_existence import refused

pytestmark = pytest.mark.timeout(60)
SAVE = f"{1:032x}"


@pytest.fixture
def service(tmp_path: Path) -> NodeService:
    """A node with one checkpoint of one shard."""
    store = LocalStore(tmp_path / "root")
    checkpointed([store], 1, {shard(0): [0]}, copies=1, size_bytes=3000)
    return NodeService(store)


def full(service: NodeService) -> Iterator[None]:
    """The disk has no room for the shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mending, "measure_room", lambda _: Room(1000, 1 << 30), raising=False)
        (service.store.root / "step-1" / shard(0)).unlink()
        yield


def lost(service: NodeService) -> Iterator[None]:
    """The shard cannot be read."""
    with refused(service.store.root / "step-1" / shard(0), errno.EIO):
        yield


def protected(service: NodeService) -> Iterator[None]:
    """The directory is read-only for its user, which root would ignore."""
    access = os.access

    def refuse(path: Any, mode: int, **named: Any) -> bool:
        return not mode & os.W_OK and access(path, mode, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", refuse)
        (service.store.root / "step-1" / shard(0)).unlink()
        yield


@pytest.mark.parametrize(("refusing", "kind"), [(full, StoreFull), (lost, StoreError), (protected, StoreDenied)])
def test_a_copy_that_cannot_be_placed_is_not_transferred(
    service: NodeService, monkeypatch: pytest.MonkeyPatch, refusing: Any, kind: type[StoreError]
) -> None:
    """The error comes before the transfer: otherwise each round would transfer all bytes and discard them."""
    monkeypatch.setattr(mending, "pull_shard", lambda *_: pytest.fail("the shard was transferred"))
    action = CopyShard(service.node_id, "step-1", SAVE, shard(0), 3000, (service.node_id,), True)
    with contextmanager(refusing)(service), pytest.raises(kind):
        Mender(service, Pace(1e12, threading.Event())).carry_out(action)


def test_a_failed_replacement_leaves_nothing_in_the_quarantine(service: NodeService) -> None:
    """Otherwise each round would add a link to the file that it could not replace."""
    with (
        open_directory(service.store.root, "step-1") as directory,
        contextmanager(protected)(service),
        pytest.raises(StoreDenied, match="place 'step-1/'"),
    ):
        directory.put_small(MANIFEST_NAME, b"another")
    assert quarantined(service.store) == []


@pytest.mark.parametrize("kind", ["lost", "directory"])
def test_an_unreadable_manifest_is_replaced(service: NodeService, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An unreadable manifest, or a directory in its place, is replaced by the manifest of another node."""
    path = service.store.root / "step-1" / MANIFEST_NAME
    raw, fdopen = path.read_bytes(), os.fdopen
    if kind == "directory":
        path.unlink()
        path.mkdir()

    def failing(fd: int, *args: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):  # noqa: PTH115
            os.close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return fdopen(fd, *args)

    with monkeypatch.context() as patch, open_directory(service.store.root, "step-1") as directory:
        if kind == "lost":
            patch.setattr(os, "fdopen", failing)
        directory.put_small(MANIFEST_NAME, raw)
    assert findings(service.store) == []


def test_a_replaced_version_that_cannot_be_removed_delays_no_other(
    service: NodeService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One replaced version cannot be removed: the others are tried, and the round goes on."""
    tried: list[str] = []

    def drop(_: LocalStore, checkpoint_id: str, save_id: str) -> bool:
        tried.append(save_id)
        raise StoreError("the disk", "remove", checkpoint_id, "OSError: Input/output error")

    monkeypatch.setattr(LocalStore, "drop_replaced", drop)
    for number in (8, 9):
        (service.store.root / "step-1" / replaced_name(f"{number:032x}")).write_bytes(b"damaged")
    drop_superseded(service, {}, (), is_done=True)
    assert tried == [f"{number:032x}" for number in (8, 9)]
    assert caplog.text.count("not removed: ") == 2


def test_a_failed_removal_is_reported(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed removal is in the result of the round. The next round removes the checkpoint."""
    stopping = threading.Event()
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    service.store.journal.append_end(SAVE, End.REMOVING)
    with monkeypatch.context() as patch:
        refusal = StoreDenied("the disk", "retire", "step-1", "PermissionError: Permission denied")
        patch.setattr("replicated_ckpt.node.saves.collector.retire", mock.Mock(side_effect=refusal))
        (failed,) = reprotector.round().failed
    assert f"remove step-1 (save {SAVE})" in failed
    assert "Permission denied" in failed
    assert reprotector.round().failed == ()
    assert service.holdings() == ()


def test_a_partial_copy_is_removed_in_the_next_round(service: NodeService) -> None:
    """A partial copy that could not be removed is removed in the next round, not only at the next start."""
    stopping = threading.Event()
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    left = service.store.root / "step-1" / f"{shard(0)}.{'2' * 32}.part"
    left.write_bytes(b"a part of a shard")
    assert reprotector.round().failed == ()
    assert not left.exists()
    assert findings(service.store) == []


def test_a_root_that_its_user_has_removed_stays_removed(service: NodeService) -> None:
    """The agent does not create the root again before it notices that the root was removed."""
    stopping, root = threading.Event(), service.store.root
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    root.rename(root.with_name("old"))
    service.damage.mark("step-1", SAVE, shard(0))
    assert service.list_stale_saves() == ()
    with pytest.raises(StoreError):
        reprotector.round()
    assert not root.exists()


def test_a_removal_needs_no_disk_space(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal creates no file or directory, so it works on a full disk."""

    def refuse(path: Any, *_: object, **__: object) -> None:
        code = errno.EEXIST if os.path.exists(path) else errno.ENOSPC  # noqa: PTH110 - as mkdir checks it
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    assert retire(service.store.root, "step-1", SAVE)
    assert service.holdings() == ()
    assert not (service.store.root / "step-1").exists()


def test_a_scrub_that_hangs_does_not_delay_the_exit(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrub hangs in a read: a stopping agent does not wait for it."""
    monkeypatch.setattr("replicated_ckpt.agent.repair.scrub._JOIN_S", 0.1, raising=False)
    stopping, reading, hangs = threading.Event(), threading.Event(), threading.Event()
    scrubber = Scrubber(
        service.store, service.node_id, Pace(1e12, stopping), stopping, 0.01, lambda _: None, service.damage
    )

    def scrub() -> Any:
        reading.set()
        hangs.wait()

    monkeypatch.setattr(scrubber, "scrub", scrub)
    scrubber.start()
    assert reading.wait(20)
    stopping.set()
    joining = threading.Thread(target=scrubber.join, daemon=True)
    joining.start()
    joining.join(10)
    is_over = not joining.is_alive()
    hangs.set()
    assert is_over


def test_a_failed_submission_closes_its_descriptors(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The submission fails, and its descriptors are closed, which frees the rank's memory."""
    monkeypatch.setattr("replicated_ckpt.node.saves.submissions._KEPT", 0)
    submissions = Submissions(service.store)
    copies = WantedCopies(SAVE, shard(0), service.node_id)
    for _ in range(2):
        fd = os.memfd_create("shard")
        with refused(service.store.root / ".staging", errno.EIO):
            future = submissions.take_shard(SubmittedShard(copies, []), [fd])
            assert future.exception(20) is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("method", ["is_staged", "is_locked", "intent_of"])
@pytest.mark.parametrize("error", [StoreError("the disk", "read", "intent", "EIO"), OSError(errno.EMFILE, "too many")])
def test_a_stale_save_is_removed_after_a_disk_error(
    service: NodeService, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    """A stale save is removed although one check of it fails."""
    save_id, look, left = f"{9:032x}", getattr(LocalStore, method), [error]
    service.store.begin(Intent(save_id, "step-9", "by hand", overwrite=True))

    def refused_once(store: LocalStore, asked: str) -> Any:
        if left:
            raise left.pop()
        return look(store, asked)

    monkeypatch.setattr(LocalStore, method, refused_once)
    follow_stale_save(service, save_id)
    assert (left, service.store.is_staged(save_id)) == ([], False)
    assert findings(service.store) == []
