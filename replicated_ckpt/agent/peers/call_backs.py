"""How often this agent calls back: a flood of greetings makes it connect no more often than stated here.

A node is greeted in the name of each node, from each address, a few times in a row and then now and then: as often as an
agent starts and leaves. Call backs for one sender wait for each other, so that a sender whose call backs hang delays its
own alone. A refused greeting is not lost: the agent that sent it greets again in its next round.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from replicated_ckpt.errors import StoreUnavailable

IN_A_ROW_MAX = 4
INTERVAL_S = 10.0
"""In the name of one node, from one address: so many greetings in a row are followed up, and then one in this time."""
PER_SENDER_MAX = 16
PARALLEL_MAX = 64
"""Call backs under way, for one sender's address and in total."""
WAIT_MAX_S = 2.0
PAIRS_MAX = 16_384
"""Names of nodes with addresses of senders that are remembered: twice what an address book holds."""
_HINT = "The agent that greets does so again in its next round; nothing is to be done."


class CallBacks:
    """Safe for concurrent use. The names of nodes are of the address book, and the addresses those of connections."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._paid_until: dict[tuple[str, str], float] = {}
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def take_turn(self, node_id: str, sender: str) -> Iterator[None]:
        """Does the block, a call back of a node in whose name `sender` greets, when its turn has come.

        Raises:
            StoreUnavailable: there were too many; the block was not begun.
        """
        with self._changed:
            self._charge(node_id, sender)
            if not self._changed.wait_for(lambda: self._has_room(sender), WAIT_MAX_S):
                raise _refusal(node_id, f"{self._under_way.total()} greetings are followed up already")
            self._under_way[sender] += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= Counter([sender])  # forgets a sender without any
                self._changed.notify_all()

    def _charge(self, node_id: str, sender: str) -> None:
        """Each call back costs INTERVAL_S; as much as IN_A_ROW_MAX of them cost may be owed."""
        now, pair = self._clock(), (node_id, sender)
        for old, paid_until in list(self._paid_until.items()) if len(self._paid_until) >= PAIRS_MAX else ():
            if paid_until <= now:
                del self._paid_until[old]
        due = max(self._paid_until.get(pair, now), now) + INTERVAL_S
        if due > now + IN_A_ROW_MAX * INTERVAL_S:
            raise _refusal(node_id, f"{sender} greets in its name more than once in {INTERVAL_S:.0f} s")
        if pair not in self._paid_until and len(self._paid_until) >= PAIRS_MAX:
            raise _refusal(node_id, f"more than {PAIRS_MAX} nodes and senders greet")
        self._paid_until[pair] = due

    def _has_room(self, sender: str) -> bool:
        return self._under_way[sender] < PER_SENDER_MAX and self._under_way.total() < PARALLEL_MAX


def _refusal(node_id: str, why: str) -> StoreUnavailable:
    return StoreUnavailable("this agent", "hear", f"node {node_id[:80]}", why, _HINT)
