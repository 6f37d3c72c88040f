"""The open connections of an agent. Their number is bounded: to admit a new one, the agent closes one that only waits."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.agent.state.rights import Right

log = logging.getLogger(__name__)

OWNER_RESERVE = 64  # for this node's ranks and commands, however many requests other nodes send
SENDER_REQUESTS_MAX = 256  # one peer that retries without end must not take every place
_WARNING_INTERVAL_S = 60.0


@dataclass
class _Connection:
    stream: socket.socket
    is_known: bool = False
    is_working: bool = False
    is_owner: bool = False


class Connections:
    """Connections by the peer's address, the one that has waited longest first. Safe for concurrent use.

    To make room, a connection that never showed a token is closed first, then one between two requests. A connection with
    a request in progress is never closed. Requests in progress are bounded, in total and for each address, except those of
    the owner. So there is always a connection that can be closed.
    """

    def __init__(self, maximum: int, owner_reserve: int = OWNER_RESERVE, of_sender: int = SENDER_REQUESTS_MAX) -> None:
        self._maximum = maximum
        self._others_max = maximum - owner_reserve
        self._of_sender_max = of_sender
        self._lock = threading.Lock()
        self._open: dict[Any, _Connection] = {}
        self._working = Counter[str]()
        """Requests in progress by the sender's address, without the owner's."""
        self._warned_at = -_WARNING_INTERVAL_S

    def admit(self, peer: Any, stream: socket.socket) -> bool:
        """Adds a connection, and closes another one if there are too many. False: all have a request in progress."""
        with self._lock:
            if len(self._open) >= self._maximum:
                self._warn()
                if not self._close_one():
                    return False
            self._open[peer] = _Connection(stream)
        return True

    def _close_one(self) -> bool:
        waiting = [peer for peer, connection in self._open.items() if not connection.is_working]
        # Unauthenticated ones first: a port scan must not push out a peer of the job.
        victim = next((peer for peer in waiting if not self._open[peer].is_known), None) or next(iter(waiting), None)
        if victim is None:
            return False
        with contextlib.suppress(OSError):  # the connection was closed already
            # Shut down, not closed: its thread still uses the descriptor, whose number another file could get.
            socket.socket.shutdown(self._open.pop(victim).stream, socket.SHUT_RDWR)
        return True

    def _warn(self) -> None:
        now = time.monotonic()
        # A flood of connections must not become a flood of log lines.
        if now - self._warned_at >= _WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning("%d connections are open: closing those that have waited longest", self._maximum)

    def secure(self, peer: Any, stream: socket.socket) -> None:
        """Replaces the stream of a connection, which continues over TLS."""
        with self._lock:
            if peer in self._open:
                self._open[peer].stream = stream

    def is_known(self, peer: Any) -> bool:
        """Whether the connection has shown a valid token."""
        with self._lock:
            return peer in self._open and self._open[peer].is_known

    def note_working(self, peer: Any, right: Right) -> bool:
        """Counts a request with a valid token. False: too many are in progress, of its sender or in total."""
        with self._lock:
            connection = self._open.get(peer)
            if connection is None:  # it was closed meanwhile, to make room
                return False
            self._note_idle(peer, connection)
            connection.is_known, connection.is_owner = True, right is Right.OWNER
            if not connection.is_owner:
                if self._working.total() >= self._others_max or self._working[peer[0]] >= self._of_sender_max:
                    return False
                self._working[peer[0]] += 1
            connection.is_working = True
            return True

    def has_requests(self) -> bool:
        """Whether a request is in progress on any connection: its answer is not completely sent."""
        with self._lock:
            return any(connection.is_working for connection in self._open.values())

    def note_answered(self, peer: Any) -> None:
        """Ends the request of a connection: its answer was sent."""
        with self._lock:
            if peer in self._open:
                # Moved to the end: connections are closed in the order in which they began to wait.
                connection = self._open.pop(peer)
                self._note_idle(peer, connection)
                self._open[peer] = connection

    def end(self, peer: Any) -> None:
        with self._lock:
            connection = self._open.pop(peer, None)
            if connection is not None:
                self._note_idle(peer, connection)

    def _note_idle(self, peer: Any, connection: _Connection) -> None:
        if connection.is_working and not connection.is_owner:
            self._working -= Counter([peer[0]])  # removes an address whose count is 0
        connection.is_working = False


INTERVAL_S = 60.0
ADDRESSES_MAX = 256
"""Clients from further addresses are counted together."""
_OTHERS = "other addresses"


@dataclass
class _UnauthenticatedClient:
    logged_at: float
    count: int = 0
    last: str = ""


class UnauthenticatedClients:
    """Logs connections and requests without a valid token, one line a minute for each address. Safe for concurrent use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: dict[str, _UnauthenticatedClient] = {}
        self._next_look = 0.0

    def log_refusal(self, address: str, what: str) -> None:
        """Counts a connection or request from `address` without a valid token; `what` describes it for the log."""
        now = self._clock()
        with self._lock:
            lines = self._due(now) if now >= self._next_look else []
            if address not in self._by_address and len(self._by_address) >= ADDRESSES_MAX:
                # A client may use ever new addresses: memory and log must stay bounded.
                address = _OTHERS
            found = self._by_address.get(address)
            if found is None:
                self._by_address[address] = _UnauthenticatedClient(now)
                lines.append(f"no valid token from {address}: {what}")
            else:
                found.count += 1
                found.last = what
        # Outside the lock: a log on a slow disk must not hold up every connection.
        for line in lines:
            log.warning("%s", line)

    def _due(self, now: float) -> list[str]:
        """A line for each address with refusals in the last minute. An address without any is forgotten."""
        lines = []
        for address, found in list(self._by_address.items()):
            if now - found.logged_at < INTERVAL_S:
                continue
            if found.count:
                since_s = now - found.logged_at
                lines.append(
                    f"no valid token from {address}: {found.count} times in {since_s:.0f} s, last: {found.last}"
                )
                self._by_address[address] = _UnauthenticatedClient(now)
            else:
                del self._by_address[address]
        self._next_look = min((found.logged_at for found in self._by_address.values()), default=now) + INTERVAL_S
        return lines
