"""How long a rank looks for the end of a save that was acknowledged as staged: by its own store, as no process tells it."""

import time

from replicated_ckpt.dcp.hand_over.held_save import HeldSave
from replicated_ckpt.errors import StoreUnavailable

FOLLOWED_STAGED_S = 600.0
"""So long after its own shard is written a rank looks how such a save ends: the coordinator's node may be gone for good."""
FOLLOWED_FAILED_S = 30.0
"""The same, where its agent hangs or has died over the shard: by then the coordinator's agent has given the save up."""
_UNKNOWN = "The coordinator's node does not say; `replicated-ckpt status` names the nodes that this save waits for."


class Patience:
    """One save's. `check` is called at each look. One thread."""

    def __init__(self, held: HeldSave, root: str, save_id: str) -> None:
        self._held, self._root, self._save_id = held, root, save_id
        self._until = time.monotonic() + FOLLOWED_STAGED_S

    def check(self) -> None:
        """Raises StoreUnavailable: it is followed no longer. Others: what kept the agent from writing the shard."""
        now = time.monotonic()
        if not self._held.is_written:
            self._until = now + FOLLOWED_STAGED_S
            return
        failure = self._held.find_failure()
        if failure is not None:
            self._until = min(self._until, now + FOLLOWED_FAILED_S)
        if now <= self._until:
            return
        if failure is not None:
            raise failure
        what = f"it is staged here {FOLLOWED_STAGED_S:g} s after this rank's shard was written"
        raise StoreUnavailable(f"store {self._root}", "follow", self._save_id, what, _UNKNOWN)
