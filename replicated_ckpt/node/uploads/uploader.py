"""Uploads: each agent uploads its own node's shards. An agent that finds all shards in the bucket commits the save
there.

No agent is in charge. The manifest, which every holder has, lists the shards; the bucket shows which of them are there.
So a restarted agent continues its uploads, and a node with a copy uploads the shards of a lost owner.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView
from replicated_ckpt.core.upkeep.upload_plan import UploadState, choose_uploader
from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectCorrupt,
    ReplicatedCkptError,
    SaveAborted,
    SaveSuperseded,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.watch import PeerWatch, SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.upload_book import RETRY_MAX_S, UploadBook, UploadedFiles, UploadProgress
from replicated_ckpt.node.uploads.bucket_retention import (
    check_wanted,
    make_node_report,
    retire_in_bucket,
    tidy_after,
    withdraw_removed,
)
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave, key_of, prefix_of
from replicated_ckpt.stores.bucket_client.client import UploadSource
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.local.directories.committed import descriptions, open_committed_save
from replicated_ckpt.stores.threads import FanOut, start_thread
from replicated_ckpt.stores.throttle import Pace, Stopped
from replicated_ckpt.stores.verified import Expected

log = logging.getLogger(__name__)

HELD_WITHIN_S = 30.0
"""How long a removal waits for a request in progress. After that, the upload removes its own objects."""


class UploadPaused(Exception):
    """The save is being removed: its upload stops for now."""


class PausedUploads:
    """The save that the uploader works on, and the saves that it must not start. Safe for concurrent use."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_work = ""
        self._paused: Counter[str] = Counter()

    @contextmanager
    def work_on(self, save_id: str) -> Iterator[None]:
        """The uploader wraps all its work on one save in this. Raises UploadPaused: the save is paused."""
        with self._changed:
            if save_id in self._paused:
                raise UploadPaused
            self._at_work = save_id
        try:
            yield
        finally:
            with self._changed:
                self._at_work = ""
                self._changed.notify_all()

    @contextmanager
    def pause(self, save_id: str) -> Iterator[None]:
        """Pauses the upload of a save inside the block. Waits up to HELD_WITHIN_S for a request in progress."""
        with self._changed:
            self._paused[save_id] += 1
            self._changed.wait_for(lambda: self._at_work != save_id, HELD_WITHIN_S)
        try:
            yield
        finally:
            with self._changed:
                self._paused -= Counter([save_id])

    def check_not_paused(self, save_id: str) -> None:
        """Between two steps of an upload. Raises UploadPaused."""
        with self._changed:
            if save_id in self._paused:
                raise UploadPaused


IDLE_PAUSE_S = 5.0
WAITED_FOR_S = 1.0
"""Pause between two looks for the shards of other nodes while a rank waits for the upload."""
BUSY_S = 3600.0
"""How long an agent that ranks started stays for an upload without progress."""
_FORGOTTEN_MAX = 1024
SHARDS_PARALLEL = 2
"""Shards that are uploaded at once, each in PARTS_PARALLEL parts with 16 MiB of memory per part."""
LOOK_AGAIN_S = 2.0
"""How long one request is retried before the whole try fails."""
_JOIN_S = 2.0
_MISSING_MAX = 8


class Uploader:
    """One thread. `state_of` and `status` may be called from others; `round` may be called before `start`."""

    def __init__(
        self,
        service: NodeService,
        book: UploadBook,
        pace: Pace,
        timeouts: SilenceTimeouts,
        stopping: threading.Event,
        on_bad: Callable[[str, str, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self.book = book
        self._pace = pace
        self._pace_lock = threading.Lock()
        self._timeouts = timeouts
        self._watch_lock = threading.Lock()
        # An agent that announced its exit uploads nothing: other nodes take over its shards at once.
        self._watch = PeerWatch(service.peers, replace(timeouts, away_after_s=0.0), clock)
        self._stopping = stopping
        self._on_bad = on_bad
        self._clock = clock
        self._uploads: dict[str, UploadProgress] = {}
        self._replaced_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self._uploaded = UploadedFiles()
        self.paused = PausedUploads()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rckpt-upload", daemon=True)
        self.bytes_sent = 0

    def start(self) -> None:
        start_thread(self._thread)

    def wake(self) -> None:
        self._woken.set()

    def join(self) -> None:
        """Waits up to 2 s for the thread, after `stopping` was set. A request that hangs ends with the process."""
        self._woken.set()
        self._thread.join(_JOIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether an upload is pending that made progress in the last BUSY_S."""
        since = self._clock() - BUSY_S
        return any(
            upload.is_pending and not upload.state.is_denied and upload.moved_at > since
            for upload in self._read_uploads().values()
        )

    def _read_uploads(self) -> dict[str, UploadProgress]:
        with self._lock:
            return dict(self._uploads)

    def status(self) -> Mapping[str, Any]:
        uploads, now = self._read_uploads(), self._clock()
        for upload in uploads.values():
            upload.measure_failing(now)
        pending = {save_id: asdict(upload.state) for save_id, upload in uploads.items() if upload.is_pending}
        return {"pending": pending, "done": len(uploads) - len(pending), "bytes_sent": self.bytes_sent}

    def node_report(self) -> NodeReport:
        """This node's report of its retention policies and uploads. From any thread."""
        return make_node_report(self._service, self.book, self._read_uploads())

    def state_of(self, save_id: str) -> UploadState | None:
        """The progress of a save. The next look comes soon, as the caller waits. None: not here, or not to be uploaded."""
        if save_id not in self._uploads or self.book.is_ordered(save_id):  # the order may name another bucket
            self._find_wanted()
        upload = self._uploads.get(save_id)
        if upload is None:
            return None
        upload.measure_failing(self._clock())
        if upload.is_pending and not upload.state.error:
            soon = self._clock() + WAITED_FOR_S
            if upload.due > soon:
                upload.due = soon
                self._woken.set()
        return upload.state

    def try_now(self, *save_ids: str) -> None:
        """Tries these uploads, or all, at once: the reason of their failures may be gone."""
        for save_id, upload in self._read_uploads().items():
            if upload.is_pending and (save_id in save_ids or not save_ids):
                upload.try_now()
        self._woken.set()

    def order(self, save_id: str, url: str) -> None:
        """Orders the upload of a save. The bucket is read again, as it may have been emptied. Raises StoreError."""
        self.book.order(save_id, url)
        with self._lock:
            if save_id in self._uploads and not self._uploads[save_id].is_pending:
                del self._uploads[save_id]
        self.try_now(save_id)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                pause_s = self.round()
            except Stopped:
                return
            except (ReplicatedCkptError, OSError) as exc:
                log.error("uploads continue in %.0f s: %s", IDLE_PAUSE_S, exc)  # noqa: TRY400 - it explains itself
                pause_s = IDLE_PAUSE_S
            except Exception:
                log.exception("a defect in replicated_ckpt: uploads continue in %.0f s", RETRY_MAX_S)
                pause_s = RETRY_MAX_S
            self._woken.wait(pause_s)

    def round(self) -> float:
        """Advances all uploads that are due, newest save first; returns the seconds until the next one is due.

        Raises:
            StoreError: the node's own store cannot be read. Stopped: the agent is leaving.
        """
        away: dict[str, StoreUnavailable] = {}
        found = self._find_wanted()
        if not found:  # the usual case without a bucket: each commit wakes the uploader
            self._forget_gone(set())
            return IDLE_PAUSE_S
        for manifest, upload in sorted(found, key=lambda wanted: -wanted[0].sequence):
            if self._stopping.is_set():
                raise Stopped
            if upload.due > self._clock():
                continue
            if upload.state.url in away:  # a try would only time out, and delay uploads to other buckets
                upload.fail(away[upload.state.url], self._clock())
            elif isinstance(exc := self._try(manifest, upload), StoreUnavailable):
                away[upload.state.url] = exc
        left = self._find_wanted()
        self._forget_gone({manifest.save_id for manifest, _ in left})
        soonest = min((upload.due for _, upload in left), default=None)
        return IDLE_PAUSE_S if soonest is None else min(IDLE_PAUSE_S, max(0.0, soonest - self._clock()))

    def _find_wanted(self) -> list[tuple[Manifest, UploadProgress]]:
        """The committed saves of this node that must be uploaded, and are not known to be in the bucket."""
        removed, catalog = self._service.store.journal.read_removed(), self._service.store.catalog
        committed = [
            manifest for name, manifest in catalog.committed() if name == manifest.checkpoint_id
        ]  # not renamed
        replaced = [manifest for name, manifest in catalog.read_replaced() if name == manifest.checkpoint_id]
        with self._lock:
            committed += self._find_left(replaced)
            return self._pending([manifest for manifest in committed if manifest.save_id not in removed])

    def _find_left(self, replaced: Sequence[Manifest]) -> list[Manifest]:
        """Replaced versions whose newer version is not whole after `lost_after_s`: its nodes may be lost.

        Before that they are not uploaded: usually the newer version is uploaded instead, and they are removed here.
        """
        now = self._clock()
        self._replaced_since = {one.save_id: self._replaced_since.get(one.save_id, now) for one in replaced}
        long = now - self._timeouts.lost_after_s
        return [manifest for manifest in replaced if self._replaced_since[manifest.save_id] < long]

    def _pending(self, committed: Sequence[Manifest]) -> list[tuple[Manifest, UploadProgress]]:
        found, now = {}, self._clock()
        for asked in map(self.book.apply, committed):
            if asked.upload is None:
                continue
            upload = self._uploads.get(asked.save_id)
            if upload is None or upload.state.url != asked.upload.url:  # an order was given, or is over
                state = UploadState(asked.checkpoint_id, asked.upload.url)
                upload = self._uploads[asked.save_id] = UploadProgress(state, first_seen=now, moved_at=now)
            if upload.is_pending:
                found[asked.save_id] = asked, upload
        for save_id, upload in list(self._uploads.items()):
            if upload.is_pending and save_id not in found:
                del self._uploads[save_id]  # replaced or removed here before it was uploaded
        # An agent that runs for months must not remember every upload.
        while len(self._uploads) > _FORGOTTEN_MAX + len(found):
            del self._uploads[next(iter(self._uploads))]
        return list(found.values())

    def _try(self, manifest: Manifest, upload: UploadProgress) -> ReplicatedCkptError | None:
        """Tries one upload; returns its error, if any."""
        upload.state.attempts += 1
        try:
            with self.paused.work_on(manifest.save_id):
                is_there = self._advance(manifest, upload)
            if not is_there:
                upload.wait_for_end(self._clock())
                return None
            upload.end("committed")
            log.info("%s is committed in %s", manifest.checkpoint_id, upload.state.url)
        except UploadPaused:
            upload.wait_for_end(self._clock())
            return None
        except SaveAborted as exc:
            is_denied = isinstance(exc, SaveSuperseded)
            upload.end("superseded", str(exc) if is_denied else exc.message)
            upload.state.is_denied = is_denied
            level = logging.WARNING if is_denied else logging.INFO
            log.log(level, "%s is no longer uploaded: %s", manifest.checkpoint_id, exc.message)
        except ReplicatedCkptError as exc:
            if isinstance(exc, ConfigInvalid) and self._is_uploaded_by_others(manifest):
                upload.end("committed")
                return None
            upload.fail(exc, self._clock())
            self._service.figures.count_error("upload", exc)
            log.warning("upload of %s to %s failed: %s", manifest.checkpoint_id, upload.state.url, exc)
            return exc
        # Otherwise it was ordered to another bucket meanwhile.
        if self._uploads.get(manifest.save_id) is upload and not self._is_refused_elsewhere(manifest):
            self.book.forget(manifest.save_id)
        return None

    def _is_uploaded_by_others(self, manifest: Manifest) -> bool:
        """Whether another node has seen the save in its bucket. A new node may have the copies, but not the bucket's name
        and credentials, until its first save.
        """
        if self.book.is_ordered(manifest.save_id):
            return False
        reports = [view.node_report for view in self._look()]
        return any(manifest.save_id in one.uploaded - one.absent for one in reports)

    def _is_refused_elsewhere(self, manifest: Manifest) -> bool:
        """Whether a user's order stays in force after its commit: the save's own bucket refuses uploads.

        Without the order, this agent would try the own bucket for as long as the save exists.
        """
        name = manifest.checkpoint_id
        if not self.book.is_ordered(manifest.save_id):
            return False
        try:
            own = self._service.store.catalog.manifest(name).upload
            if own is None:
                return False
            last_errors = {one.state.kind for one in self._read_uploads().values() if one.state.url == own.url}
            # A bucket that hangs would cost another time-out.
            if StoreUnavailable.__name__ not in last_errors:
                self.book.bucket(own.url).save_of(name)
        except (StoreDenied, ConfigInvalid) as exc:
            log.info("%s is no longer uploaded to its own bucket, which refuses: %s", name, exc)
            return True
        except ReplicatedCkptError as exc:
            log.info("%s is uploaded to its own bucket, too, once that answers: %s", name, exc)
        return False

    def _forget_gone(self, wanted: Collection[str]) -> None:
        """Forgets saves that are no longer here: replaced, retired or removed before their upload was over."""
        gone = self.book.read_saves().difference(wanted)
        if not gone or any(self._service.store.catalog.with_invalid_manifest()):
            return  # a damaged manifest may belong to one of them
        here = {holding.save_id for holding in self._service.holdings()} - self._service.store.journal.read_removed()
        for save_id in gone - here:
            self.book.forget(save_id)

    def _advance(self, manifest: Manifest, upload: UploadProgress) -> bool:
        """Uploads this node's part of a save; returns whether the save is committed in the bucket afterwards."""
        bucket, save_id = self._open_with_retries(upload.state.url), manifest.save_id
        there = bucket.save_of(manifest.checkpoint_id)
        if there is not None and self._is_whole(bucket, manifest, there, upload):
            tidy_after(bucket, manifest, there)
            return True
        bucket.check_place(manifest, there)  # also for a save that lacks a shard, and will never be complete
        check_wanted(self._service, bucket, manifest)
        missing = set(manifest.shards) - self._find_intact(bucket, manifest, upload)
        mine = self._choose_own(manifest, missing, upload)
        self._bring_all(bucket, manifest, sorted(mine), upload)
        missing -= mine
        # If the save has no prefix of its own, another save may have overwritten its objects since.
        if missing or not prefix_of(manifest):
            missing = manifest.shards.keys() - self._find_intact(bucket, manifest, upload)
        if missing:
            return False
        # Opened only now: the version may have been replaced while its shards were uploaded.
        with open_committed_save(self._service.store.root, manifest.checkpoint_id, save_id) as (directory, _):
            raw_manifest, raw_metadata = descriptions(directory, manifest)
        # Every shard was seen intact: only now may the bucket's commit mark appear.
        bucket.commit(manifest, raw_manifest, raw_metadata)
        if self._service.marks.read().is_rejected(save_id):
            bucket.mark_rejected(manifest.checkpoint_id, save_id, is_rejected=True)
        # The user may have removed the save meanwhile: the upload must not bring it back.
        withdraw_removed(self._service, bucket, manifest, self._look)
        uploads = self._read_uploads()
        for gone in uploads.keys() & retire_in_bucket(self._service, bucket, manifest):
            uploads[gone].is_retired = uploads[gone].state.url == upload.state.url
        return True

    def _open_with_retries(self, url: str) -> Bucket:
        """Opens a bucket that retries requests for LOOK_AGAIN_S. A try makes about twenty: one failure must not end it."""
        client, within_s = self.book.bucket(url).client, LOOK_AGAIN_S
        return Bucket(
            RetryingClient(client, within_s=within_s, look_within_s=within_s, should_stop=self._stopping.is_set)
        )

    def _is_whole(self, bucket: Bucket, manifest: Manifest, there: BucketSave, upload: UploadProgress) -> bool:
        """Whether the save is committed there with all its objects. For a user's order, each shard is also checked.

        If the bucket has dropped the optimizer, only the weights' objects count.
        """
        if there.mark is not None and there.mark.is_slim and manifest.weights is not None:
            manifest = manifest.slimmed()
        if there.save_id != manifest.save_id or not manifest.shard_sizes.items() <= there.sizes.items():
            return False
        if not self.book.is_ordered(manifest.save_id):
            return True
        return bucket.is_described(there) and manifest.shards.keys() == self._find_intact(bucket, manifest, upload)

    def _find_intact(self, bucket: Bucket, manifest: Manifest, upload: UploadProgress) -> set[str]:
        """The intact shards in the bucket. A shard that was intact once is not checked again, with one exception.

        If the save has no prefix of its own, another one may have overwritten its shards: once all are there, all are
        checked again.
        """
        arrived = bucket.find_arrived(manifest)
        if arrived == manifest.shards.keys() and not prefix_of(manifest):
            upload.intact.clear()
        looked = FanOut.run(arrived - upload.intact, partial(bucket.is_intact, manifest)).raise_first()
        with self._lock:
            upload.intact.update(name for name, is_intact in looked.items() if is_intact)
            there = arrived & upload.intact
            upload.state.shards_there = len(there)
            upload.state.missing = sorted(manifest.shards.keys() - there)[:_MISSING_MAX]
        return there

    def _choose_own(self, manifest: Manifest, missing: set[str], upload: UploadProgress) -> set[str]:
        """The missing shards that this node must upload: its own, and those of owners that are gone."""
        own = self._service.node_id
        held = {
            name
            for holding in self._service.holdings()
            if holding.save_id == manifest.save_id
            for name in holding.sizes
        }
        mine = {name for name in missing & held if manifest.shards[name].owner_node == own}
        others = (missing & held) - mine
        # The owners get time to begin: else every holder of a copy would upload the same shards at once.
        if others and self._clock() - upload.first_seen > self._timeouts.lost_after_s / 3:
            views = self._look()
            is_ordered = self.book.is_ordered(manifest.save_id)
            chosen = partial(choose_uploader, manifest, views=views, own_node=own, is_ordered=is_ordered)
            mine |= {name for name in others if chosen(name) == own}
        return mine

    def _look(self) -> Sequence[NodeView]:
        """Asks the other nodes for their holdings. From any thread of an upload."""
        with self._watch_lock:
            return self._watch.look()

    def _bring_all(self, bucket: Bucket, manifest: Manifest, names: Sequence[str], upload: UploadProgress) -> None:
        """Uploads several shards at once, so that the round trips of one overlap with the bytes of another."""

        def bring(name: str) -> None:
            self._bring(bucket, manifest, name, upload)
            self.paused.check_not_paused(manifest.save_id)
            withdraw_removed(self._service, bucket, manifest, self._look)

        FanOut.run(names, bring, most=SHARDS_PARALLEL, until_error=True).raise_first()

    def _bring(self, bucket: Bucket, manifest: Manifest, name: str, upload: UploadProgress) -> None:
        entry, store, save_id = manifest.shards[name], self._service.store, manifest.save_id
        label = f"node {self._service.node_id} at {store.root}"
        try:
            with open_committed_save(store.root, manifest.checkpoint_id, save_id) as (directory, _):
                fd = directory.open(name)
            status, expected = os.fstat(fd), Expected(entry.size_bytes, entry.crc32c)
            known = self._uploaded.find(upload.state.url, status)
            with UploadSource(fd, label, name, expected, self.book.begun(save_id, name)) as source:
                if known is None or not bucket.copy_shard(manifest, name, known):
                    bucket.put_shard(manifest, name, source, partial(self._wait_for_pace, save_id, upload))
            self._uploaded.note(upload.state.url, status, name, key_of(manifest, name))
        except ObjectCorrupt as exc:
            # Otherwise the bucket has returned other bytes: this node's copy is not suspect.
            if exc.store == label:
                self._on_bad(manifest.checkpoint_id, save_id, name, exc.message)
            raise
        with self._lock:
            upload.intact.add(name)
            upload.state.shards_there += 1

    def _wait_for_pace(self, save_id: str, upload: UploadProgress, size_bytes: int) -> None:
        self.paused.check_not_paused(save_id)
        # Shards are uploaded in parallel, and share one limit.
        with self._pace_lock:
            # An upload with progress keeps the agent running, however long it takes.
            upload.moved_at = self._clock()
            self._pace.take(size_bytes)
            self.bytes_sent += size_bytes
            upload.state.bytes_sent += size_bytes
