"""The fence: saves that were given up on this node, so that later bytes of them are refused."""

import threading

from replicated_ckpt.errors import SaveAborted

_FENCED_MAX = 1024


class Fence:
    """Why each save was given up, the latest of them. Safe for concurrent use; forgotten when the agent ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: dict[str, str] = {}

    def give_up(self, save_id: str, why: str) -> None:
        with self._lock:
            self._why[save_id] = why
            while len(self._why) > _FENCED_MAX:
                del self._why[next(iter(self._why))]

    def lift(self, save_id: str) -> None:
        """The save was found committed elsewhere: it is completed here, too."""
        with self._lock:
            self._why.pop(save_id, None)

    def check(self, save_id: str, node_id: str) -> None:
        """Raises SaveAborted: the save was given up."""
        with self._lock:
            why = self._why.get(save_id)
        if why is not None:
            raise SaveAborted(f"Save {save_id} was given up on node {node_id}: {why}.")
