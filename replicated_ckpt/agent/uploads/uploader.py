"""Uploads: each agent brings its own node's shards to the bucket, and the one that sees that all are there commits.

No agent is in charge. What a save needs is in its manifest, which every holder has; what is there already is in the bucket.
So an agent that restarts looks and carries on, and a holder of a copy does the part of an owner that is gone.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from replicated_ckpt.agent.peers.watch import Patience, PeerWatch
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.state.targets import TargetBook
from replicated_ckpt.agent.state.upload_orders import OrderBook
from replicated_ckpt.agent.uploads.bucket_retention import (
    check_wanted,
    retire_in_bucket,
    standing_of,
    take_back_removed,
)
from replicated_ckpt.core.bucket.upload_plan import UploadState, choose_uploader
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import Standing
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ObjectCorrupt,
    ReplicatedCkptError,
    SaveAborted,
    StoreDenied,
)
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.upload_source import UploadSource
from replicated_ckpt.stores.files.existence import list_prefixed
from replicated_ckpt.stores.local.directories.committed import descriptions, open_committed_save
from replicated_ckpt.stores.throttle import Pace, Stopped
from replicated_ckpt.stores.verified import Expected

log = logging.getLogger(__name__)

IDLE_PAUSE_S = 5.0
WAIT_FIRST_S, WAIT_MAX_S = 0.3, 10.0
"""How long between two looks for the shards of the others."""
WAITED_FOR_S = 1.0
"""The same while a rank asks how far it has come."""
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 60.0
"""How long between two tries after an error; drawn between half and all of it, so that nodes do not try in step."""
BUSY_S = 3600.0
"""An agent that ranks started stays that long for an upload that does not move."""
_FORGOTTEN_MAX = 1024
_JOIN_S = 2.0


class Uploader:
    """One thread. `state_of` and `status` may be called from others; `round` directly, while the thread is off."""

    def __init__(
        self,
        service: NodeService,
        targets: TargetBook,
        pace: Pace,
        patience: Patience,
        stopping: threading.Event,
        on_bad: Callable[[str, str, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._targets = targets
        self._pace = pace
        self._pace_lock = threading.Lock()
        self._patience = patience
        self._watch = PeerWatch(service.peers, replace(patience, away_after_s=0.0), clock)
        self._stopping = stopping
        self._on_bad = on_bad
        self._clock = clock
        self.orders = OrderBook(service.store.agent_directory())
        self._states: dict[str, UploadState] = {}
        self._failing_since: dict[str, float] = {}
        self._first_seen: dict[str, float] = {}
        self._moved_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._checked: set[tuple[str, str]] = set()
        self._waits: dict[str, float] = {}
        self._replaced_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rckpt-upload", daemon=True)
        self.bytes_sent = 0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Has the next look happen now."""
        self._woken.set()

    def join(self) -> None:
        """Waits a moment for the thread, after `stopping` was set: a request that hangs ends with the process."""
        self._woken.set()
        self._thread.join(_JOIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be uploaded, and has not waited in vain for BUSY_S."""
        since = self._clock() - BUSY_S
        return any(
            state.state == "pending" and not state.is_denied and self._moved_at.get(save_id, since) > since
            for save_id, state in self._read_states()
        )

    def _read_states(self) -> list[tuple[str, UploadState]]:
        with self._lock:
            return list(self._states.items())

    def status(self) -> Mapping[str, Any]:
        states = self._read_states()
        pending = {save_id: asdict(state) for save_id, state in states if state.state == "pending"}
        return {"pending": pending, "done": len(states) - len(pending), "bytes_sent": self.bytes_sent}

    def standing(self) -> Standing:
        """What this node says of its policies of retention and its uploads. From any thread."""
        return standing_of(self._service, self.orders, self._states)

    def state_of(self, save_id: str) -> UploadState | None:
        """How far a save has come; the caller waits, so it is looked at soon. None: not here, or not to be uploaded."""
        if save_id not in self._states:
            self._find_wanted()
        state = self._states.get(save_id)
        if state is not None and state.state == "pending" and not state.error:
            soon = self._clock() + WAITED_FOR_S
            if self._due.get(save_id, 0.0) > soon:
                self._due[save_id] = soon
                self._woken.set()
        return state

    def try_now(self, *save_ids: str) -> None:
        """Has these saves, or all, tried at once as if they had not failed yet: the reason may be gone."""
        for save_id in save_ids or list(self._due):
            state = self._states.get(save_id)
            if state is not None and state.state == "pending":
                state.is_denied, state.failing_s = False, 0.0
                self._failing_since.pop(save_id, None)
                self._due[save_id] = 0.0
        self._woken.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                pause_s = self.round()
            except Stopped:
                return
            except (ReplicatedCkptError, OSError) as exc:
                log.error("uploads go on in %.0f s: %s", IDLE_PAUSE_S, exc)  # noqa: TRY400 - it explains itself
                pause_s = IDLE_PAUSE_S
            except Exception:
                log.exception("a defect: uploads go on in %.0f s", RETRY_MAX_S)
                pause_s = RETRY_MAX_S
            self._woken.wait(pause_s)

    def round(self) -> float:
        """Does what is due, newest save first; returns the seconds until something is due again.

        Raises:
            StoreError: the own store cannot be read. Stopped: the agent is leaving.
        """
        wanted = sorted(self._find_wanted(), key=lambda manifest: -manifest.sequence)
        for manifest in wanted:
            if self._stopping.is_set():
                raise Stopped
            if self._due.get(manifest.save_id, 0.0) <= self._clock():
                self._try(manifest)
        soonest = min((self._due[manifest.save_id] for manifest in self._find_wanted()), default=None)
        return IDLE_PAUSE_S if soonest is None else min(IDLE_PAUSE_S, max(0.0, soonest - self._clock()))

    def _find_wanted(self) -> list[Manifest]:
        """The saves here that are to be uploaded and are not known to be in the bucket, by what is committed here now."""
        removed, catalog = self._service.removals.read_all(), self._service.store.catalog
        committed = [manifest for _, manifest in catalog.committed()]
        replaced = list(catalog.read_replaced())
        with self._lock:
            committed += self._find_left(replaced)
            return self._pending([manifest for manifest in committed if manifest.save_id not in removed])

    def _find_left(self, replaced: Sequence[Manifest]) -> list[Manifest]:
        """The replaced versions whose newer ones are not whole after so long that nodes may be gone that had parts of them.

        Before that they are not worth the upload: the newer one goes to the bucket, and they go from here.
        """
        now = self._clock()
        self._replaced_since = {one.save_id: self._replaced_since.get(one.save_id, now) for one in replaced}
        long = now - self._patience.lost_after_s
        return [manifest for manifest in replaced if self._replaced_since[manifest.save_id] < long]

    def _pending(self, committed: Sequence[Manifest]) -> list[Manifest]:
        found = []
        for asked in map(self.orders.apply, committed):
            if asked.upload is None:
                continue
            state = self._states.setdefault(asked.save_id, UploadState(asked.checkpoint_id, asked.upload.url))
            if state.state == "pending":
                self._first_seen.setdefault(asked.save_id, self._clock())
                self._moved_at.setdefault(asked.save_id, self._clock())
                self._due.setdefault(asked.save_id, 0.0)
                found.append(asked)
        here = {manifest.save_id for manifest in found}
        for save_id in [
            known for known, state in self._states.items() if state.state == "pending" and known not in here
        ]:
            del self._states[save_id]  # replaced or removed here before it was uploaded
        while len(self._states) > _FORGOTTEN_MAX + len(here):
            del self._states[next(iter(self._states))]
        return found

    def _try(self, manifest: Manifest) -> None:
        save_id, state = manifest.save_id, self._states[manifest.save_id]
        state.attempts += 1
        try:
            is_done = self._advance(manifest, state)
        except SaveAborted as exc:
            state.state, state.error = "superseded", exc.message
            self._forget(save_id)
            log.info("%s is not uploaded any more: %s", manifest.checkpoint_id, exc.message)
            return
        except ReplicatedCkptError as exc:
            self._note_failure(save_id, state, exc)
            log.warning("%s to %s: %s", manifest.checkpoint_id, state.url, exc)
            return
        self._failing_since.pop(save_id, None)
        state.error, state.kind, state.is_denied, state.failing_s = "", "", False, 0.0
        if is_done:
            state.state = "committed"
            self._forget(save_id)
            log.info("%s is committed in %s", manifest.checkpoint_id, state.url)
            return
        wait_s = self._waits[save_id] = min(WAIT_MAX_S, 1.5 * self._waits.get(save_id, WAIT_FIRST_S))
        self._due[save_id] = self._clock() + wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - chance, not secrecy

    def _forget(self, save_id: str) -> None:
        """Drops what was only needed until the end of a save's upload."""
        self.orders.done(save_id)
        for notes in list_prefixed(self._service.store.agent_directory(), f"upload-{save_id}-"):
            notes.unlink(missing_ok=True)
        self._checked = {key for key in self._checked if key[0] != save_id}
        for book in (self._due, self._waits, self._moved_at, self._first_seen, self._failing_since):
            book.pop(save_id, None)

    def _note_failure(self, save_id: str, state: UploadState, exc: ReplicatedCkptError) -> None:
        now = self._clock()
        since = self._failing_since.setdefault(save_id, now)
        state.error, state.kind, state.failing_s = str(exc), type(exc).__name__, now - since
        state.is_denied = isinstance(exc, StoreDenied | ConfigInvalid | CheckpointExists)
        pause_s = min(
            RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(state.attempts, 20), max(RETRY_FIRST_S, 2 * state.failing_s)
        )
        self._due[save_id] = now + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - chance, not secrecy

    def _advance(self, manifest: Manifest, state: UploadState) -> bool:
        """Uploads what is this node's to upload now; whether the save is committed in the bucket afterwards."""
        bucket, save_id = self._targets.bucket(state.url), manifest.save_id
        there = bucket.save_of(manifest.checkpoint_id)
        if there is not None and there.save_id == save_id:
            return True
        check_wanted(self._service, bucket, manifest)
        arrived = {name for name in bucket.find_arrived(manifest) if self._is_intact(bucket, manifest, name)}
        missing = set(manifest.shards) - arrived
        for name in sorted(self._mine(manifest, missing)):
            self._bring(bucket, manifest, name, state)
            missing.discard(name)
        if missing and missing - {
            name for name in bucket.find_arrived(manifest) if self._is_intact(bucket, manifest, name)
        }:
            return False
        with open_committed_save(self._service.store.root, manifest.checkpoint_id, save_id) as (directory, _):
            raw_manifest, raw_metadata = descriptions(directory, manifest)
        bucket.commit(manifest, raw_manifest, raw_metadata)
        take_back_removed(self._service, bucket, manifest)
        retire_in_bucket(self._service, bucket, manifest)
        return True

    def _is_intact(self, bucket: Bucket, manifest: Manifest, name: str) -> bool:
        key = (manifest.save_id, name)
        if key not in self._checked and bucket.is_intact(manifest, name):
            self._checked.add(key)
        return key in self._checked

    def _mine(self, manifest: Manifest, missing: set[str]) -> set[str]:
        """Those of the missing shards that this node brings: its own, and those whose owners are gone."""
        own = self._service.node_id
        held = {
            name
            for holding in self._service.holdings()
            if holding.save_id == manifest.save_id
            for name in holding.sizes
        }
        mine = {name for name in missing & held if manifest.shards[name].owner_node == own}
        others = (missing & held) - mine
        if others and self._clock() - self._first_seen[manifest.save_id] > self._patience.lost_after_s / 3:
            views = self._watch.look()
            mine |= {name for name in others if choose_uploader(manifest, name, views, own) == own}
        return mine

    def _bring(self, bucket: Bucket, manifest: Manifest, name: str, state: UploadState) -> None:
        entry, store = manifest.shards[name], self._service.store
        label = f"node {self._service.node_id} at {store.root}"
        notes = store.agent_directory() / f"upload-{manifest.save_id}-{name}.json"
        try:
            with open_committed_save(store.root, manifest.checkpoint_id, manifest.save_id) as (directory, _):
                expected = Expected(entry.size_bytes, entry.crc32c)
                source = UploadSource(directory.open(name), label, name, expected, resume_path=notes)
            with source:
                bucket.put_shard(manifest, name, source, partial(self._wait_for_pace, manifest.save_id))
        except ObjectCorrupt as exc:
            if exc.store == label:
                self._on_bad(manifest.checkpoint_id, manifest.save_id, name, exc.message)
            raise
        state.bytes_sent += entry.size_bytes
        self._checked.add((manifest.save_id, name))

    def _wait_for_pace(self, save_id: str, size_bytes: int) -> None:
        with self._pace_lock:
            self._moved_at[save_id] = self._clock()
            self._pace.take(size_bytes)
            self.bytes_sent += size_bytes
