"""Checks of this whole store that others ask for: one at a time, so that asking more often does not read more at once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replicated_ckpt.agent.requests.request import Request
from replicated_ckpt.errors import StoreUnavailable

CHECKS_MAX = 16
"""Under way or waiting for their turn: as many nodes may be told to verify at the same hour."""


class Checks:
    """Safe for concurrent use."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(CHECKS_MAX)
        self._turn = threading.Lock()

    @contextmanager
    def in_turn(self, request: Request, body_bytes_max: int = 0) -> Iterator[bytes]:
        """Does the block, with the request's body, when no other check is under way; the agent gives signs of life.

        Raises:
            StoreUnavailable: too many wait already, and the body was not read. PeerProtocolError: it is too large.
        """
        if not self._places.acquire(blocking=False):
            detail = f"{CHECKS_MAX} checks of this node are under way or wait"
            raise StoreUnavailable("this agent", "verify", "", detail, "Ask again when they are done.")
        try:
            with request.heartbeat, self._turn:  # one body at a time, too
                yield request.body.read_all(body_bytes_max) if body_bytes_max else b""
        finally:
            self._places.release()
