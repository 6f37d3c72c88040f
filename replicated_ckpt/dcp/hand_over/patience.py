"""How long a rank looks for the end of a save that was acknowledged as staged: in its own store, as no agent tells it."""

import time
from collections.abc import Callable

from replicated_ckpt.dcp.c10d.blackboard import COORDINATOR, Blackboard
from replicated_ckpt.dcp.hand_over.held_save import HeldSave
from replicated_ckpt.dcp.hand_over.outcome import is_told_committed
from replicated_ckpt.errors import MeetingFailed, StoreUnavailable

HELD_STAGED_S = 60.0
"""So long a rank holds a save that was acknowledged as staged. From then on its node's agent settles it by itself."""
FOLLOWED_STAGED_S = 600.0
"""So long after its own shard is written a rank looks how such a save ends: the coordinator's node may be gone for good."""
FOLLOWED_FAILED_S = 30.0
"""The same, where its agent hangs or has died over the shard: by then the coordinator's agent has given the save up."""
TOLD_EVERY_S = 5.0
"""How often it looks what the coordinator's rank has said of the end: of a thousand ranks each look is a message."""
ASKED_FOR_S = 10.0
"""So long it looks for that word of a save that is not on its node any more: it comes right after the end."""
_LOOK_FIRST_S, _LOOK_MAX_S = 0.02, 0.5
_UNKNOWN = "The coordinator's node does not say; `replicated-ckpt status` names the nodes that this save waits for."


class Patience:
    """One save's. One thread."""

    def __init__(self, held: HeldSave, root: str, save_id: str, board: Blackboard | None) -> None:
        self._held, self._root, self._save_id, self._board = held, root, save_id, board
        now = time.monotonic()
        self._until, self._told_at = now + FOLLOWED_STAGED_S, now + TOLD_EVERY_S

    def wait_while(self, is_staged: Callable[[], bool]) -> bool:
        """Returns once the save is not staged on this node any more (False), or its coordinator's rank says that it is
        committed, though this node has not published it (True).

        Raises:
            StoreUnavailable: it is followed no longer. Others: what kept the agent from writing the shard, or the
                coordinator's rank from completing the save.
        """
        pause_s, held_until = _LOOK_FIRST_S, time.monotonic() + HELD_STAGED_S
        while is_staged():
            time.sleep(pause_s)
            pause_s = min(_LOOK_MAX_S, 1.3 * pause_s)
            now = time.monotonic()
            if now > held_until:
                self._held.close()
            if self._is_told(now):
                return True
            self._check_time(now)
        return False

    def ask_coordinator(self) -> bool:
        """Whether a save that is not on this node any more was committed: a newer one may have replaced it since.

        False: the coordinator's rank does not say.

        Raises: what the coordinator's rank has failed with.
        """
        until = time.monotonic() + ASKED_FOR_S
        while self._board is not None and time.monotonic() < until:
            try:
                is_gone = COORDINATOR in self._board.find_lost()  # before the word: it may say it and end
            except MeetingFailed:  # as in `_is_told`
                return False
            if self._is_told(self._told_at):
                return True
            if is_gone:
                return False
            time.sleep(_LOOK_MAX_S)
        return False

    def _check_time(self, now: float) -> None:
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

    def _is_told(self, now: float) -> bool:
        if self._board is None or now < self._told_at:
            return False
        self._told_at = now + TOLD_EVERY_S
        try:
            return is_told_committed(self._board, self._save_id)
        except MeetingFailed:  # rank 0 has ended, or what serves the store: nothing will be told
            self._board = None
            return False
