"""One save's upload as the agent's memory has it: how far it has come, and when it is tried again."""

import random
from dataclasses import dataclass, field

from replicated_ckpt.core.bucket.upload_plan import UploadState
from replicated_ckpt.errors import CheckpointExists, ConfigInvalid, ReplicatedCkptError, StoreDenied

WAIT_FIRST_S, WAIT_MAX_S = 0.1, 10.0
"""How long between two looks for the shards of the others."""
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 60.0
"""How long between two tries after an error; drawn between half and all of it, so that nodes do not try in step."""


@dataclass
class UploadProgress:
    """`state` is what others are told, `intact` the shards that were found so in the bucket. Times are the uploader's.

    `is_retired`: it was there, and this agent has removed it since, as the bucket's retention says.
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
        """Whether it is known not to be in the bucket, and will not come there."""
        return self.is_retired or self.state.state == "superseded"

    def end(self, state: str, why: str = "") -> None:
        """It is "committed" or "superseded"."""
        self._clear_error()
        self.state.state, self.state.error = state, why
        self.intact.clear()

    def wait_for_end(self, now: float) -> None:
        """This node has brought what it can: the next look is soon, then ever later."""
        self._clear_error()
        self._wait_s = min(WAIT_MAX_S, 1.5 * self._wait_s)
        self._pause(now, self._wait_s)

    def fail(self, exc: ReplicatedCkptError, now: float) -> None:
        """Notes what a try has failed with, and when the next one is."""
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
        """The next try is at once, as if none had failed yet."""
        self.state.is_denied, self.state.failing_s = False, 0.0
        self._failing_since, self.due = None, 0.0

    def _clear_error(self) -> None:
        self._failing_since = None
        self.state.error, self.state.kind, self.state.is_denied, self.state.failing_s = "", "", False, 0.0

    def _pause(self, now: float, pause_s: float) -> None:
        self.due = now + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - chance, not secrecy
