"""Uploads, in memory: the progress of each save, with the time of the next try; and the files whose bytes a bucket has."""

import os
import random
import threading
from dataclasses import dataclass, field

from replicated_ckpt.core.bucket.upload_plan import UploadState
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.errors import CheckpointExists, ConfigInvalid, ReplicatedCkptError, StoreDenied

WAIT_FIRST_S, WAIT_MAX_S = 0.1, 10.0
"""Between two looks for the shards of other nodes."""
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 60.0
"""Between two tries after an error, times a random 0.5 to 1, so that nodes do not retry in step."""


@dataclass
class UploadProgress:
    """`state`: the public part. `intact`: shards that were found intact in the bucket. Times are from the uploader's clock.

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
        """This node has uploaded its part, and waits for others: the pause between looks grows."""
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

    def try_now(self) -> None:
        """Tries again at once, as if no try had failed."""
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
    """The keys of uploaded files of unchanged entries, by bucket and file. Safe for concurrent use.

    No file is written in place, so the same file has the same bytes. An agent that starts knows none, and uploads once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[_Place, str] = {}

    def find(self, url: str, status: os.stat_result) -> str | None:
        """The key under which the bucket has this file."""
        with self._lock:
            return self._keys.get(_place_of(url, status))

    def note(self, url: str, status: os.stat_result, name: str, key: str) -> None:
        """The bucket has this file, the shard `name`, under this key. Only those of unchanged entries are kept."""
        if part_of_shard(name) is not Part.UNCHANGED:
            return
        with self._lock:
            self._keys.pop(_place_of(url, status), None)  # the newest key last
            self._keys[_place_of(url, status)] = key
            for old in list(self._keys)[:-_KNOWN_MAX]:
                del self._keys[old]


def _place_of(url: str, status: os.stat_result) -> _Place:
    return url, status.st_ino, status.st_mtime_ns, status.st_size
