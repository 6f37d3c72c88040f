"""Rounds of the uploader without an agent, on stores made by hand."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads import uploader as uploader_module
from replicated_ckpt.node.uploads.bucket_retention import TOLD_MAX
from replicated_ckpt.node.uploads.uploader import BUSY_S, Uploader, UploadPaused
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.bucket.bucket_removal import remove_save
from replicated_ckpt.stores.bucket_client.client import PART_BYTES
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.journal import End
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import retire
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, shard
from tests.agent.repair.test_reprotect import RING, agents, stores
from tests.buckets.servers import Server
from tests.cli.commands import command


class SlowPace(Pace):
    """A pace at which each piece takes 0.8 of `BUSY_S`, the time that an agent stays for a stalled upload."""

    def __init__(self) -> None:
        super().__init__(1.0, threading.Event())
        self.now_s = 0.0
        self.was_busy: list[bool] = []
        self.uploader: Uploader | None = None

    def take(self, size_bytes: int) -> None:
        self.now_s += 0.8 * BUSY_S
        assert self.uploader is not None
        self.was_busy.append(self.uploader.is_busy)


def test_an_agent_stays_for_an_upload_that_moves(moto: Server, tmp_path: Path) -> None:
    """An agent stays for an upload while its parts make progress, however long the shard takes in all."""
    store = LocalStore(tmp_path / "node")
    manifest = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=2 * PART_BYTES)
    pace, targets = SlowPace(), UploadBook(store.agent_directory())
    target = ObjectTarget.check_supported(f"s3://{moto.make_bucket('long-hours')}/x", moto.storage_options())
    targets.learn(target)
    uploader = pace.uploader = Uploader(
        NodeService(store), targets, pace, SilenceTimeouts(), threading.Event(), lambda *_: None, lambda: pace.now_s
    )
    uploader.book.order(manifest.save_id, target.url)
    uploader.round()
    assert len(pace.was_busy) >= 3
    assert all(pace.was_busy)
    assert not uploader.is_busy
    assert targets.bucket(target.url).save_of("step-1") is not None


def uploading(
    root: Path, url: str, clock: Callable[[], float] = time.monotonic
) -> tuple[Uploader, NodeService, UploadBook]:
    store = LocalStore(root)
    service, targets, stopping = NodeService(store), UploadBook(store.agent_directory()), threading.Event()
    targets.learn(ObjectTarget.check_supported(url, {}))
    pace = Pace(1e12, stopping)
    return Uploader(service, targets, pace, SilenceTimeouts(), stopping, lambda *_: None, clock), service, targets


def test_a_save_removed_before_its_upload_is_not_uploaded(tmp_path: Path) -> None:
    """A save that the user removed before its upload is not uploaded, even while a load keeps its files on the node."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    manifest = checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url)
    service.store.journal.append_end(manifest.save_id, End.REMOVING)
    uploader.round()
    assert targets.bucket(url).save_of("step-1") is None
    assert uploader.state_of(manifest.save_id) is None
    assert not uploader.node_report().uploading


@pytest.mark.parametrize("is_absent", [False, True])
def test_a_new_node_leaves_uploads_that_others_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_absent: bool
) -> None:
    """A blank node with copies does not know the bucket until its first save. That is a failure only for a save that no
    other node has seen in the bucket.
    """
    uploader, service, _ = uploading(tmp_path / "node", f"file://{tmp_path}/another")
    manifest = checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=f"file://{tmp_path}/b")
    saves = frozenset({manifest.save_id})
    report = NodeReport(uploaded=saves, absent=saves if is_absent else frozenset())
    monkeypatch.setattr(uploader, "_look", lambda: [NodeView("other", Presence.UP, (), node_report=report)])
    uploader.round()
    assert uploader.status()["pending"].keys() == (saves if is_absent else frozenset())
    assert uploader.node_report().unable == (saves if is_absent else frozenset())


def test_a_removal_here_keeps_what_another_node_has_committed(tmp_path: Path) -> None:
    """A save is removed on this node while another node, which keeps it, commits its upload: the bucket keeps the
    checkpoint.
    """
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "here", url)
    other, mark = LocalStore(tmp_path / "there"), tmp_path / "bucket" / "run" / "step-1" / ".metadata"
    UploadBook(other.agent_directory()).learn(ObjectTarget.check_supported(url, {}))
    holders = {shard(0): (0, 1), shard(1): (1, 0)}
    manifest = checkpointed([service.store, other], 1, holders, size_bytes=3000, url=url)
    with running_agent(other.root, "--round-every-s", "0.2") as there:
        service.peers.learn([there.endpoint.address()])

        def remove(_: str) -> None:
            wait_for(mark.exists, 30, "the commit by the other node")
            service.store.journal.append_end(manifest.save_id, End.REMOVING)

        with failpoints.arm("upload.shard-arrived", remove):
            uploader.round()
        state = uploader.state_of(manifest.save_id)
        assert state is not None
        assert "of this node removed" in state.error
        found = targets.bucket(url).save_of("step-1")
        assert found is not None
        assert found.save_id == manifest.save_id
    assert findings(other) == []


@pytest.mark.parametrize("has_own_prefix", [True, False])
def test_an_unseen_checkpoint_of_stock_torch_is_not_overwritten(tmp_path: Path, has_own_prefix: bool) -> None:
    """The bucket has a checkpoint of stock torch that the save did not see: the upload ends with an error. A later save
    that saw it replaces it.
    """
    url, there = f"file://{tmp_path}/bucket/run", tmp_path / "bucket" / "run" / "step-1"
    there.mkdir(parents=True)
    stock = {".metadata": b"a pickle of stock's" * 20, "__0_0.distcp": b"x" * 3000}
    for name, data in stock.items():
        (there / name).write_bytes(data)
    uploader, service, targets = uploading(tmp_path / "node", url)
    given: dict[str, Any] = {"copies": 1, "size_bytes": 3000, "url": url, "has_own_prefix": has_own_prefix}
    manifest = checkpointed([service.store], 1, {shard(0): (0,)}, **given)
    uploader.round()
    state = uploader.state_of(manifest.save_id)
    assert state is not None
    assert "was written by stock torch. This save did not find it" in state.error
    assert {name: (there / name).read_bytes() for name in stock} == stock
    found = targets.bucket(url).save_of("step-1")
    assert found is not None
    given |= {"has_own_prefix": True, "replaces_in_bucket": found.save_id}
    newer = checkpointed([service.store], 2, {shard(0): (0,)}, **given)
    uploader.try_now()
    uploader.round()
    found = targets.bucket(url).save_of("step-1")
    assert found is not None
    assert found.save_id == newer.save_id, "the save that saw stock torch's checkpoint replaces it"
    assert findings(service.store) == []


@pytest.mark.parametrize("point", ["upload.shard-arrived", "upload.manifest-put", "upload.marked"])
def test_a_save_removed_during_its_upload_leaves_nothing_in_the_bucket(tmp_path: Path, point: str) -> None:
    """A save is removed on the node during its upload: the upload removes its files from the bucket."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, _ = uploading(tmp_path / "node", url)
    shards = {shard(0): (0,), shard(1): (0,)}
    manifest = checkpointed([service.store], 1, shards, copies=1, size_bytes=3000, url=url)

    def remove(_: str) -> None:
        service.store.journal.append_end(manifest.save_id, End.REMOVING)
        retire(service.store.root, "step-1", manifest.save_id)

    with failpoints.arm(point, remove):
        uploader.round()
    assert list(service.store.catalog.committed()) == [], "the upload reached that point"
    assert [path.name for path in (tmp_path / "bucket").rglob("*") if path.is_file()] == []
    assert not uploader.is_busy


@pytest.mark.timeout(60)
@pytest.mark.parametrize("has_own_prefix", [False, True])
def test_a_save_removed_between_two_parts_leaves_no_unfinished_upload(
    moto: Server, tmp_path: Path, *, has_own_prefix: bool
) -> None:
    """A removal between two parts aborts the multipart upload. Unfinished parts appear in no listing of objects, but
    are charged.
    """
    bucket, store = moto.make_bucket(f"between-parts-{int(has_own_prefix)}"), LocalStore(tmp_path / "node")
    target = ObjectTarget.check_supported(f"s3://{bucket}/run", moto.storage_options())
    targets = UploadBook(store.agent_directory())
    targets.learn(target)
    shards = {shard(0): (0,), shard(1): (0,)}
    manifest = checkpointed(
        [store], 1, shards, copies=1, size_bytes=6 * PART_BYTES, url=target.url, has_own_prefix=has_own_prefix
    )
    stopping = threading.Event()
    uploader = Uploader(NodeService(store), targets, Pace(1e12, stopping), SilenceTimeouts(), stopping, lambda *_: None)
    removals: list[threading.Thread] = []
    is_paused = threading.Event()

    def remove() -> None:
        with uploader.paused.pause(manifest.save_id):
            remove_save(targets.bucket(target.url), "step-1", manifest.save_id, manifest)

    def begin_removal(_: str) -> None:
        if not removals:
            removals.append(threading.Thread(target=remove))
            removals[0].start()
            wait_for(lambda: is_locked(uploader, manifest.save_id), 30, "the removal has paused the upload")
            is_paused.set()
        is_paused.wait(30)

    with failpoints.arm("upload.part-sent", begin_removal):
        uploader.round()
    removals[0].join(30)
    assert targets.bucket(target.url).save_of("step-1") is None
    listed = moto.client().list_multipart_uploads(Bucket=bucket)
    assert [upload["Key"] for upload in listed.get("Uploads", ())] == []


def is_locked(uploader: Uploader, save_id: str) -> bool:
    try:
        uploader.paused.check_not_paused(save_id)
    except UploadPaused:
        return True
    return False


@pytest.mark.timeout(60)
def test_two_shards_of_a_node_are_uploaded_at_once(tmp_path: Path) -> None:
    """The uploader sends two shards of a node concurrently: each arrives before either is done."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    shards = {shard(rank): (0,) for rank in range(4)}
    manifest = checkpointed([service.store], 1, shards, copies=1, size_bytes=3000, url=url)
    meeting = threading.Barrier(2)

    def meet(_: str) -> None:
        meeting.wait(30)

    with failpoints.arm("upload.shard-arrived", meet):
        uploader.round()
    assert not meeting.broken
    there = targets.bucket(url).save_of("step-1")
    assert there is not None
    assert (there.save_id, set(there.sizes)) == (manifest.save_id, set(shards))


def test_an_agent_stopped_in_its_commit_removes_no_newer_save(tmp_path: Path) -> None:
    """In a store without conditional writes, an agent resumes its commit after a newer save has committed: the newer
    save stays, intact.
    """
    url = f"file://{tmp_path}/bucket/run"
    (old, *_), (new, *_) = sides = [uploading(tmp_path / name, url) for name in ("old", "new")]
    for number, (_, service, _) in enumerate(sides, 1):
        shards = {shard(0): (0,)}
        checkpointed([service.store], number, shards, copies=1, size_bytes=3000, url=url, has_own_prefix=True)
    overtakers = [new]

    def overtake(_: str) -> None:
        while overtakers:
            overtakers.pop().round()

    with failpoints.arm("upload.manifest-put", overtake):
        old.round()
    there = sides[0][2].bucket(url).save_of("step-1")
    assert there is not None
    assert (there.save_id, set(there.sizes)) == (f"{2:032x}", {shard(0)})
    assert not old.is_busy
    new.order(there.save_id, url)
    new.round()
    left = {path.parent.name for path in (tmp_path / "bucket").rglob("*") if path.is_file()}
    assert left == {"step-1", there.save_id}, "the older save's files are removed"


def test_a_save_removed_during_its_commit_is_removed_from_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is removed on the node while its upload commits: the upload removes the checkpoint from the bucket, and
    does not repeat.
    """
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url)
    committed: list[str] = []

    def commit(bucket: Bucket, of: Manifest, raw_manifest: bytes, raw_metadata: bytes) -> None:
        real_commit(bucket, of, raw_manifest, raw_metadata)
        committed.append(of.checkpoint_id)
        service.store.journal.append_end(of.save_id, End.REMOVING)

    real_commit = Bucket.commit
    monkeypatch.setattr(Bucket, "commit", commit)
    for _ in range(2):
        uploader.round()
    assert committed == ["step-1"]
    assert targets.bucket(url).save_of("step-1") is None
    assert not uploader.is_busy


def test_a_shard_is_uploaded_in_parts_without_threads(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system starts no threads, the uploader's own thread sends the parts in sequence."""

    def start(thread: threading.Thread) -> None:
        if "_work" in thread.name:  # a thread of a fan-out
            raise RuntimeError("can't start new thread")
        start_really(thread)

    start_really = threading.Thread.start
    store, stopping = LocalStore(tmp_path / "node"), threading.Event()
    target = ObjectTarget.check_supported(f"s3://{moto.make_bucket('no-threads')}/x", moto.storage_options())
    targets = UploadBook(store.agent_directory())
    targets.learn(target)
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=2 * PART_BYTES, url=target.url)
    uploader = Uploader(NodeService(store), targets, Pace(1e12, stopping), SilenceTimeouts(), stopping, lambda *_: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    uploader.round()
    assert targets.bucket(target.url).save_of("step-1") is not None


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_order_to_a_second_bucket_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """An order to a second bucket, given before, during or after the upload to the first, stays pending until the
    second has the save.

    The save is reported as uploaded only once the first bucket has it, too.
    """
    first, second = f"file://{tmp_path}/first", f"file://{tmp_path}/second"
    uploader, service, targets = uploading(tmp_path / "node", first)
    targets.learn(ObjectTarget.check_supported(second, {}))
    manifest = checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=first)

    def order(*_: object) -> frozenset[str]:
        uploader.book.order(manifest.save_id, second)
        state = uploader.state_of(manifest.save_id)
        assert state is not None
        assert (state.state, state.url) == ("pending", second)
        return frozenset()

    if when == "before":
        uploader.state_of(manifest.save_id)
    elif when == "during":
        monkeypatch.setattr(uploader_module, "retire_in_bucket", order)
        uploader.round()
        monkeypatch.undo()
    else:
        uploader.round()
    order()
    uploader.round()
    assert targets.bucket(second).save_of("step-1") is not None
    assert (uploader.node_report().ordered, uploader.node_report().uploaded) == (frozenset(), frozenset())
    uploader.round()
    assert targets.bucket(first).save_of("step-1") is not None
    assert not uploader.is_busy
    assert uploader.node_report().uploaded == {manifest.save_id}


def test_an_order_replaces_a_bucket_that_refuses(moto: Server, tmp_path: Path) -> None:
    """The save's own bucket has a mistyped name. Once the ordered bucket has the save, the own one is no longer tried,
    also after a restart, and the save counts as uploaded, but not as there.
    """
    wrong, right = "s3://no-such-bucket/x", f"s3://{moto.make_bucket('right')}/x"
    store, stopping, times = LocalStore(tmp_path / "node"), threading.Event(), [0.0]
    service, targets = NodeService(store), UploadBook(store.agent_directory())
    for url in (wrong, right):
        targets.learn(ObjectTarget.check_supported(url, moto.storage_options()))

    def start_uploader() -> Uploader:
        book = UploadBook(store.agent_directory())
        return Uploader(
            service, book, Pace(1e12, stopping), SilenceTimeouts(), stopping, lambda *_: None, lambda: times[0]
        )

    manifest = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=wrong)
    uploader = start_uploader()
    for _ in range(2):
        uploader.round()
        times[0] += 100.0
    assert uploader.status()["pending"][manifest.save_id]["failing_s"] == 200.0
    assert uploader.node_report().unable == {manifest.save_id}
    uploader.order(manifest.save_id, right)
    uploader.round()
    assert targets.bucket(right).save_of("step-1") is not None
    for restarted in (uploader, start_uploader()):
        restarted.round()
        assert restarted.status()["pending"] == {}
        report = restarted.node_report()
        assert not report.uploading
        assert report.uploaded == report.absent == {manifest.save_id}


class CutPace(Pace):
    """A pace that fails every request: the connection is lost before the first part."""

    def take(self, size_bytes: int) -> None:
        raise StoreUnavailable("the bucket", "write", "a part", f"cut before {size_bytes} bytes")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_nothing_is_left_of_an_upload_whose_checkpoint_was_overwritten(
    moto: Server, tmp_path: Path, *, is_restarted: bool
) -> None:
    """After the save of an unfinished upload was overwritten, the uploader deletes its order and its record, also after
    a restart.
    """
    store, stopping = LocalStore(tmp_path / "node"), threading.Event()
    service, targets = NodeService(store), UploadBook(store.agent_directory())
    target = ObjectTarget.check_supported(
        f"s3://{moto.make_bucket(f'overwritten-{is_restarted:d}')}/x", moto.storage_options()
    )
    targets.learn(target)

    def start_uploader() -> Uploader:
        return Uploader(service, targets, CutPace(1.0, stopping), SilenceTimeouts(), stopping, lambda *_: None)

    manifest = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=2 * PART_BYTES)
    uploader = start_uploader()
    uploader.book.order(manifest.save_id, target.url)
    uploader.round()
    assert json.loads((store.agent_directory() / "uploads.json").read_text())["begun"]
    assert uploader.is_busy
    checkpointed([store], 2, {shard(0): (0,)}, copies=1, size_bytes=3000)
    if is_restarted:
        uploader = start_uploader()
    uploader.round()
    kept = json.loads((store.agent_directory() / "uploads.json").read_text())
    assert (kept["begun"], kept["orders"]) == ([], {})
    assert not uploader.is_busy
    assert uploader.status()["pending"] == {}


def test_an_order_uploads_a_shard_that_was_deleted_in_the_bucket(tmp_path: Path) -> None:
    """A shard was deleted from the bucket after the commit: an order, as in the runbook, uploads it again."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    shards = {shard(0): (0,), shard(1): (0,)}
    manifest = checkpointed([service.store], 1, shards, copies=1, size_bytes=3000, url=url)
    uploader.round()
    (tmp_path / "bucket/run/step-1" / shard(1)).unlink()
    uploader.order(manifest.save_id, url)
    uploader.round()
    assert targets.bucket(url).find_arrived(manifest) == set(shards)
    assert all(targets.bucket(url).is_intact(manifest, name) for name in shards)
    state = uploader.state_of(manifest.save_id)
    assert state is not None
    assert state.state == "committed"


def test_what_a_commit_replaced_is_removed_after_a_lost_answer(tmp_path: Path) -> None:
    """The answer to a commit is lost: the next round removes what the commit replaced. Other unfinished uploads stay."""
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)

    def lose(_: str) -> None:
        raise StoreUnavailable(url, "commit", "step-1", "the answer is lost")

    for number in (1, 2, 3):
        newest = checkpointed(
            [service.store], number, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url, has_own_prefix=number > 1
        )
        with failpoints.arm("upload.marked", lose):
            uploader.round()
        unfinished = tmp_path / "bucket/run/step-1" / f"{number + 7:032x}" / shard(0)
        unfinished.parent.mkdir()
        unfinished.touch()
        uploader.try_now()
        uploader.round()
        assert not uploader.is_busy
    there = targets.bucket(url).save_of("step-1")
    assert there is not None
    assert there.save_id == newest.save_id
    assert targets.bucket(url).is_intact(newest, next(iter(newest.shards)))
    left = {path.parent.name for path in (tmp_path / "bucket").rglob("*") if path.is_file()}
    assert left == {"step-1", newest.save_id, *(f"{number + 7:032x}" for number in (1, 2, 3))}
    assert [path.name for path in (tmp_path / "bucket/run/step-1").iterdir() if path.is_file()] == [".metadata"]


def test_a_replaced_version_is_uploaded_if_the_newer_one_stays_incomplete(tmp_path: Path) -> None:
    """A newer save stays incomplete for `lost_after_s`: the uploader then uploads the version that it replaced, not
    earlier.
    """
    url, now = f"file://{tmp_path}/bucket/run", [1000.0]
    uploader, service, targets = uploading(tmp_path / "node", url, lambda: now[0])
    stores = [service.store, LocalStore(tmp_path / "lost")]
    older = checkpointed(stores, 1, {shard(0): (0,), shard(1): (0,)}, size_bytes=3000, on=[0], url=url)
    newer = checkpointed(stores, 2, {shard(0): (0,), shard(1): (1,)}, size_bytes=3000, on=[0])
    assert service.store.catalog.save_id_of("step-1") == newer.save_id
    assert [manifest.save_id for _, manifest in service.store.catalog.read_replaced()] == [older.save_id]
    for _ in range(3):
        uploader.round()
        now[0] += SilenceTimeouts().lost_after_s / 3
    assert targets.bucket(url).save_of("step-1") is None
    now[0] += 1
    uploader.round()
    there = targets.bucket(url).save_of("step-1")
    assert there is not None
    assert there.save_id == older.save_id
    assert targets.bucket(url).find_arrived(older) == {shard(0), shard(1)}
    assert all(targets.bucket(url).is_intact(older, name) for name in older.shards)
    assert findings(service.store) == []


def test_a_node_reports_an_upload_after_it_retired_the_save(tmp_path: Path) -> None:
    """After a node retired an uploaded save, its report lists the save until `TOLD_MAX` newer uploads. Otherwise other
    nodes would wait for it.
    """
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, targets = uploading(tmp_path / "node", url)
    manifest = checkpointed([service.store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url)
    uploader.round()
    assert targets.bucket(url).save_of("step-1") is not None
    assert retire(service.store.root, "step-1", manifest.save_id)
    for number in range(2, 2 * TOLD_MAX):
        checkpointed([service.store], number, {shard(0): (0,)}, copies=1, size_bytes=300, url=f"{url}/{number}")
        targets.learn(ObjectTarget.check_supported(f"{url}/{number}", {}))
        assert (manifest.save_id in uploader.node_report().uploaded) == (number <= TOLD_MAX + 1)
        uploader.round()


def test_an_upload_that_a_newer_save_in_the_bucket_replaced_is_dropped(tmp_path: Path) -> None:
    """A node has only a manifest of a save whose shards are lost, and the bucket has a newer save of that id: the
    upload is dropped.
    """
    url = f"file://{tmp_path}/bucket/run"
    uploader, service, _ = uploading(tmp_path / "node", url)
    stores = [service.store, LocalStore(tmp_path / "lost")]
    older = checkpointed(stores, 1, {shard(1): (1,)}, copies=1, size_bytes=3000, on=[0], url=url)
    other, others, _ = uploading(tmp_path / "other", url)
    checkpointed([others.store], 2, {shard(0): (0,)}, copies=1, size_bytes=3000, url=url)
    other.round()
    assert uploader.node_report().uploading == {older.save_id}
    uploader.round()
    assert not uploader.node_report().uploading
    assert [path.name for path in (tmp_path / "bucket" / "run" / "step-1").glob("*.distcp")] == [shard(0)]


def test_a_bucket_that_hangs_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round tries only one save of a hanging bucket, and carries out an order to another bucket."""
    away, there = f"file://{tmp_path}/away", f"file://{tmp_path}/there"
    uploader, service, targets = uploading(tmp_path / "node", away)
    targets.learn(ObjectTarget.check_supported(there, {}))
    manifests = [
        checkpointed(
            [service.store],
            number,
            {shard(0): (0,)},
            checkpoint_id=f"step-{number}",
            copies=1,
            size_bytes=3000,
            url=away,
        )
        for number in (1, 2, 3, 4)
    ]
    asked: list[str] = []

    def save_of(bucket: Bucket, checkpoint_id: str) -> BucketSave | None:
        if bucket.client.target.url == there:
            return save_really(bucket, checkpoint_id)
        asked.append(checkpoint_id)
        raise StoreUnavailable(away, "list", checkpoint_id, "it hangs")

    save_really = Bucket.save_of
    monkeypatch.setattr(Bucket, "save_of", save_of)
    uploader.order(manifests[0].save_id, there)
    uploader.round()
    assert asked == ["step-4"]
    assert targets.bucket(there).save_of("step-1") is not None
    pending = dict(uploader.status()["pending"])
    assert pending.pop(manifests[0].save_id)["url"] == away, "the order is done, and the save waits for its own bucket"
    assert all("it hangs" in upload["error"] for upload in pending.values())
    assert len(pending) == 3


def test_an_upload_that_cannot_end_fails_at_once(tmp_path: Path) -> None:
    """Nodes do not learn of a bucket from peers: `upload` fails and names the nodes without the order. A second order
    there completes the upload.
    """
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    url = f"file://{tmp_path}/bucket"
    with agents(nodes, "--lost-after-s", "6"):
        order = ("upload", "step-1", "--to", url, "--root")
        done = command(*order, nodes[0].root)
        assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
        assert f"no node that was asked to upload has {shard(1)} (on host1, host2)" in done.stderr
        assert f": No rank of node {nodes[1].node_id()} has named" in done.stderr
        assert f"`replicated-ckpt upload step-1 --to {url} --root {nodes[0].root}`" in done.stderr
        done = command(*order, nodes[2].root, "--no-wait")
        assert (done.returncode, done.stderr) == (ExitCode.OK, "")
        assert done.stdout.endswith(f"step-1: the upload to {url} is requested\n")
        done = command(*order, nodes[0].root)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (ExitCode.OK, f"step-1: committed in {url}"), (
            done.stderr
        )


def test_an_upload_that_waits_names_what_it_waits_for(tmp_path: Path) -> None:
    """Another node cannot upload a shard: progress lines and the error state how many shards arrived, and which node's
    shard is missing.
    """
    here, other = nodes = stores(tmp_path, 2)
    url = f"file://{tmp_path}/bucket"
    checkpointed(nodes, 1, {shard(0): (0,), shard(1): (1,)}, copies=1)
    (tmp_path / "bucket" / "step-1" / shard(1)).mkdir(
        parents=True
    )  # a directory in place of the object: the shard cannot be written
    with agents(nodes):
        order = ("upload", "step-1", "--to", url, "--root")
        assert command(*order, other.root, "--no-wait").returncode == ExitCode.OK
        done = command(*order, here.root, "--timeout-s", "6")
    how_far = f"1 of 2 shards are in {url}; waiting for {shard(1)} of host1 (node {other.node_id()})"
    assert (done.returncode, done.stderr.splitlines()[0]) == (ExitCode.FAILED, f"step-1: {how_far}")
    assert f"the time-out expired: {how_far}." in done.stderr
