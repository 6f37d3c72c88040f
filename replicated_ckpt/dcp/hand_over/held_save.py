"""The locks by which agents see that this rank still works on a save."""

import contextlib
import weakref
from concurrent.futures import wait

from replicated_ckpt.agent.saves.shard_copies import WrittenCopies
from replicated_ckpt.dcp.hand_over.follower import Follower
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.store import LocalStore

_SAID_WITHIN_S = 1.0


class HeldSave:
    """What a writer holds of its save, until it is closed or the writer is gone."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._follower: Follower | None = None
        weakref.finalize(self, self._open.close)

    def hold(self, store: LocalStore, save_id: str) -> None:
        """Holds the save, once more if it is held already.

        Raises:
            SaveAborted: it is not open. StoreError
        """
        with translate_errors(str(store.root), "hold", save_id):
            self._open.callback(store.lock_save(save_id).release)

    def follow(self, follower: Follower | None) -> None:
        """The shard that this node's agent was given; None: this rank has written it."""
        self._follower = follower
        if follower is not None:
            self._open.callback(follower.leave)

    def find_written(self) -> WrittenCopies | None:
        """What the agent has written, if it was given a shard, and has said so: it does as it tells the coordinator's."""
        end = None if self._follower is None else self._follower.end
        if end is None or not wait([end], _SAID_WITHIN_S).done or end.exception() is not None:
            return None  # whatever kept this rank from learning it: the save is committed
        return end.result()

    def close(self) -> None:
        self._open.close()
