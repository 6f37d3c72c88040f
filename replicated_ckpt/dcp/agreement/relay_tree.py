"""How a large file reaches many nodes: from the coordinator to a few, from each that has it to more, a tree that grows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from replicated_ckpt.errors import ReplicatedCkptError

RELAY_FROM_BYTES = 64 << 20
"""Below it, all nodes together, the coordinator's own link takes no time that would be worth a detour."""
SENDS_AT_ONCE = 2
"""By each node that has the file, the coordinator's included."""


class Relay:
    """Who may send the file to one more node now. Every node that got it sends it on. Safe for concurrent use."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._changed = threading.Condition()
        self._free = [coordinator] * SENDS_AT_ONCE

    def bring(self, node: str, send: Callable[[], object], pull: Callable[[str], object]) -> None:
        """Brings the file to `node`: `send` has the coordinator send it, `pull(source)` has it fetched from a node.

        What cannot be pulled is sent by the coordinator, and the node that it could not be pulled from sends less.

        Raises:
            ReplicatedCkptError: the coordinator could not send it either.
        """
        with self._sender() as source:
            if source == self._coordinator:
                send()
                return self._give([node] * SENDS_AT_ONCE)
        try:
            pull(source)
        except ReplicatedCkptError:
            with self._sender(self._coordinator):
                send()
                return self._give([node] * SENDS_AT_ONCE)
        return self._give([source] + [node] * SENDS_AT_ONCE)

    @contextmanager
    def _sender(self, wanted: str | None = None) -> Iterator[str]:
        """A node that has the file and is free to send it, the latest first; the coordinator is free again afterwards."""
        with self._changed:
            while not (wanted in self._free if wanted is not None else self._free):
                self._changed.wait()
            source = self._free.pop(-1 if wanted is None else self._free.index(wanted))
        try:
            yield source
        finally:
            if source == self._coordinator:
                with self._changed:
                    self._free.insert(0, source)
                    self._changed.notify_all()

    def _give(self, nodes: list[str]) -> None:
        with self._changed:
            self._free += nodes
            self._changed.notify_all()
