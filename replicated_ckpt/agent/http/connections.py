"""The open connections of an agent: bounded in number, and one that only waits makes room for one that comes."""

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 60.0


@dataclass
class _Connection:
    stream: socket.socket
    is_known: bool = False
    is_working: bool = False


class Connections:
    """Connections by the peer's address, the one that has waited longest first. Safe to use concurrently.

    So no client without the token can shut out those that have it: a connection that has never shown one is closed first,
    then one that is between requests, and never one that is being worked for.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._lock = threading.Lock()
        self._open: dict[Any, _Connection] = {}
        self._warned_at = -_WARNING_INTERVAL_S

    def admit(self, peer: Any, stream: socket.socket) -> bool:
        """Adds a connection, another one being closed if there has to be; False if all are being worked for."""
        with self._lock:
            if len(self._open) >= self._maximum:
                self._warn()
                if not self._close_one():
                    return False
            self._open[peer] = _Connection(stream)
        return True

    def _close_one(self) -> bool:
        waiting = [peer for peer, connection in self._open.items() if not connection.is_working]
        victim = next((peer for peer in waiting if not self._open[peer].is_known), None) or next(iter(waiting), None)
        if victim is None:
            return False
        with contextlib.suppress(OSError):  # its thread has closed it already, or the peer has
            socket.socket.shutdown(self._open.pop(victim).stream, socket.SHUT_RDWR)
        return True

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning("%d connections are open: those that wait longest are closed", self._maximum)

    def secure(self, peer: Any, stream: socket.socket) -> None:
        """The connection goes on over TLS."""
        with self._lock:
            if peer in self._open:
                self._open[peer].stream = stream

    def is_known(self, peer: Any) -> bool:
        """Whether the connection has shown a valid token."""
        with self._lock:
            return peer in self._open and self._open[peer].is_known

    def note_working(self, peer: Any) -> None:
        """A request with a valid token came, and is being worked on."""
        with self._lock:
            if peer in self._open:
                self._open[peer].is_working = self._open[peer].is_known = True

    def note_answered(self, peer: Any) -> None:
        """The request was answered."""
        with self._lock:
            if peer in self._open:
                connection = self._open.pop(peer)
                self._open[peer] = connection
                connection.is_working = False

    def end(self, peer: Any) -> None:
        with self._lock:
            self._open.pop(peer, None)
