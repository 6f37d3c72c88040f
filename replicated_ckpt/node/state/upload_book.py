"""The state of uploads: a file, from which a restarted agent can finish them, and their progress in memory."""

import logging
import os
import random
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from replicated_ckpt.core.manifest import Manifest, UploadEntry
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.core.upkeep.upload_plan import UploadState
from replicated_ckpt.errors import CheckpointExists, ConfigInvalid, ReplicatedCkptError, StoreDenied
from replicated_ckpt.node.state.state_file import StateFile
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.client import PART_BYTES, BegunUpload
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

log = logging.getLogger(__name__)

NAME = "uploads.json"
_TARGETS_MAX = 64
_Known = tuple[list[ObjectTarget], dict[str, str], list[tuple[str, str, dict[str, Any]]]]


def unknown_hint(url: str, root: Path, checkpoint_id: str) -> str:
    """The hint for a bucket that no rank of this node has named."""
    command = f"replicated-ckpt upload {quote(checkpoint_id)} --to {quote(url)} --root {quote(str(root))}"
    return f"Save from a rank here, or run `{command}` here, to name it again."


class UploadBook:
    """Targets by URL; URLs of orders by save id; and, by save id and shard, the state of an upload in parts.

    Only this user can read the file, as it holds credentials from the ranks. It stays small: only shards in progress
    have an entry. Safe for concurrent use. `bucket` caches opened buckets until the credentials change.
    """

    def __init__(self, directory: Path, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._root = directory.parent
        self._file = StateFile(directory / NAME, 0o600)
        self._lock = threading.Lock()
        targets, self._url_by_save, begun = self._file.read_state(_parse) or ([], {}, [])
        self._begun_by_save: dict[str, dict[str, BegunUpload]] = {}
        for save_id, shard, note in begun:
            self.begun(save_id, shard).note = note
        self._target_by_url = {target.url: target for target in targets}
        self._bucket_by_url: dict[str, Bucket] = {}

    def learn(self, target: ObjectTarget) -> bool:
        """Stores a target, in place of an older one of the same URL; returns whether it is new.

        Raises:
            StoreError: the file cannot be written. The target holds until this agent ends; the next call writes it.
        """
        with self._lock:
            is_new = self._target_by_url.pop(target.url, None) != target
            self._target_by_url[target.url] = target
            while len(self._target_by_url) > _TARGETS_MAX:
                del self._target_by_url[next(iter(self._target_by_url))]
            if is_new:
                self._bucket_by_url.pop(target.url, None)
            self._write()
        if is_new:
            log.info("object store %s is configured", target.url)
        return is_new

    def read_urls(self) -> tuple[str, ...]:
        """URLs of the buckets, in the order in which ranks last named them."""
        with self._lock:
            return tuple(self._target_by_url)

    def bucket(self, url: str, checkpoint_id: str = "ID") -> Bucket:
        """The bucket of a URL. `checkpoint_id`: for the hint.

        Raises:
            ConfigInvalid: no rank of this node has named it, or its options are invalid.
        """
        with self._lock:
            known, target = self._bucket_by_url.get(url), self._target_by_url.get(url)
        if known is not None:
            return known
        if target is None:
            raise ConfigInvalid(
                f"No rank of this node has named the object store {url}.", unknown_hint(url, self._root, checkpoint_id)
            )
        opened = Bucket(open_client(target, self._part_bytes))  # it may look for credentials for seconds
        with self._lock:
            # New credentials may have come meanwhile: a client with the old ones must not be kept.
            is_current = self._target_by_url.get(url) == target
            return self._bucket_by_url.setdefault(url, opened) if is_current else opened

    def order(self, save_id: str, url: str) -> None:
        """Stores a user's order to upload a save to `url` instead of its own target. Raises StoreError: not stored."""
        with self._lock:
            before = self._url_by_save
            self._url_by_save = {**before, save_id: url}
            try:
                self._write()
            except BaseException:
                # An order that a restart would forget is reported as failed.
                self._url_by_save = before
                raise

    def is_ordered(self, save_id: str) -> bool:
        with self._lock:
            return save_id in self._url_by_save

    def apply(self, manifest: Manifest) -> Manifest:
        """The manifest with the URL of a user's order, if there is one: it takes precedence over the save's own."""
        with self._lock:
            url = self._url_by_save.get(manifest.save_id)
        if url is None:
            return manifest
        if manifest.upload is not None:
            return replace(manifest, upload=replace(manifest.upload, url=url))
        entry = UploadEntry(url, False, manifest.metadata_bytes, manifest.metadata_crc32c)
        return replace(manifest, upload=entry)

    def begun(self, save_id: str, shard: str) -> BegunUpload:
        """The state of a shard's upload in parts, until `forget`."""
        with self._lock:
            return self._begun_by_save.setdefault(save_id, {}).setdefault(shard, BegunUpload(keep=self._keep))

    def read_saves(self) -> frozenset[str]:
        """The saves with an order or a begun upload."""
        with self._lock:
            return frozenset(self._url_by_save.keys() | self._begun_by_save.keys())

    def forget(self, save_id: str) -> None:
        """Removes the order and the begun uploads of a save, also from the disk. Raises StoreError."""
        with self._lock:
            self._url_by_save.pop(save_id, None)
            self._begun_by_save.pop(save_id, None)
            self._write()

    def _keep(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        """With the lock held. Raises StoreError"""
        begun = [
            [save_id, shard, each.note]
            for save_id, by_shard in self._begun_by_save.items()
            for shard, each in by_shard.items()
            if each.note is not None
        ]
        targets = [target.to_json() for target in self._target_by_url.values()]
        self._file.write_state({"targets": targets, "orders": self._url_by_save, "begun": begun})


def _parse(document: Any) -> _Known:
    """The targets, the orders, and the uploads that were begun."""
    targets = [target for fields in document["targets"] if (target := _parse_target(fields))]
    orders = {str(save_id): str(url) for save_id, url in document["orders"].items()}
    return targets, orders, [(str(save_id), str(shard), dict(note)) for save_id, shard, note in document["begun"]]


def _parse_target(fields: Any) -> ObjectTarget | None:
    """The target; None if this version cannot parse it. The others of the book stay."""
    try:
        return ObjectTarget.from_json(fields)
    except (ConfigInvalid, KeyError, TypeError, ValueError) as exc:
        log.warning("an object store is no longer configured: %s", exc)
        return None


WAIT_FIRST_S, WAIT_MAX_S = 0.1, 10.0
"""Pause between two looks for the shards of other nodes."""
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 60.0
"""Pause between two tries after an error, times a random 0.5 to 1, so that nodes do not retry in step."""


@dataclass
class UploadProgress:
    """The progress of one upload. Times are from the uploader's clock.

    `state`: the public part. `intact`: shards that were found intact in the bucket.

    `is_retired`: this agent has removed the save from the bucket by its retention.
    """

    state: UploadState
    first_seen: float
    moved_at: float
    due: float = 0.0
    intact: set[str] = field(default_factory=set)
    is_retired: bool = False
    _wait_s: float = WAIT_FIRST_S
    _failing_since: float | None = None

    @property
    def is_pending(self) -> bool:
        return self.state.state == "pending"

    @property
    def is_absent(self) -> bool:
        """Whether the save is not in the bucket and will not be uploaded."""
        return self.is_retired or self.state.state == "superseded"

    def end(self, state: str, why: str = "") -> None:
        """Ends the upload. `state`: "committed" or "superseded"."""
        self._clear_error()
        self.state.state, self.state.error = state, why
        self.intact.clear()

    def wait_for_end(self, now: float) -> None:
        """Sets the time of the next look for the other nodes' parts. Each pause is longer than the one before."""
        self._clear_error()
        self._wait_s = min(WAIT_MAX_S, 1.5 * self._wait_s)
        self._pause(now, self._wait_s)

    def fail(self, exc: ReplicatedCkptError, now: float) -> None:
        """Records a failed try, and the time of the next one."""
        state = self.state
        if self._failing_since is None:
            self._failing_since = now
        state.error, state.kind, state.failing_s = str(exc), type(exc).__name__, now - self._failing_since
        state.is_denied = isinstance(exc, StoreDenied | ConfigInvalid | CheckpointExists)
        # Attempts also count looks that only waited: a first failure after many must not wait a minute.
        longest_s = max(RETRY_FIRST_S, 2 * state.failing_s)
        # The exponent is bounded: 2.0 ** 1024 is an OverflowError, after days of failures.
        self._pause(now, min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(state.attempts, 20), longest_s))

    def measure_failing(self, now: float) -> None:
        """Updates `failing_s`: the last try may be a minute ago."""
        if self._failing_since is not None:
            self.state.failing_s = now - self._failing_since

    def try_now(self) -> None:
        """Makes the next try due now, as if no try had failed."""
        self.state.is_denied, self.state.failing_s = False, 0.0
        self._failing_since, self.due = None, 0.0

    def _clear_error(self) -> None:
        self._failing_since = None
        self.state.error, self.state.kind, self.state.is_denied, self.state.failing_s = "", "", False, 0.0

    def _pause(self, now: float, pause_s: float) -> None:
        self.due = now + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - chance, not secrecy


_KNOWN_MAX = 256
_Place = tuple[str, int, int, int]


class UploadedFiles:
    """The keys in buckets of files with unchanged entries, by bucket and file. Safe for concurrent use.

    Files are never written in place, so the same file has the same bytes. After its start an agent has no keys, and
    uploads each file once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[_Place, str] = {}

    def find(self, url: str, status: os.stat_result) -> str | None:
        """The key under which the bucket has this file."""
        with self._lock:
            return self._keys.get(_place_of(url, status))

    def note(self, url: str, status: os.stat_result, name: str, key: str) -> None:
        """Records under which key the bucket has this file, the shard `name`; only if its entries are unchanged ones."""
        if part_of_shard(name) is not Part.UNCHANGED:
            return
        with self._lock:
            self._keys.pop(_place_of(url, status), None)  # the newest key last
            self._keys[_place_of(url, status)] = key
            for old in list(self._keys)[:-_KNOWN_MAX]:
                del self._keys[old]


def _place_of(url: str, status: os.stat_result) -> _Place:
    return url, status.st_ino, status.st_mtime_ns, status.st_size
