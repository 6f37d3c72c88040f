"""Heartbeats: while an agent works on a long request it says so, so that the peer can tell work from death."""

import threading
from io import BufferedIOBase
from typing import Self

from replicated_ckpt.agent.requests.body import Body
from replicated_ckpt.stores.thread_start import start_worker

INTERVAL_S = 1.0
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Heartbeat:
    """Sends an interim HTTP response every second inside its `with` block, and nothing once the block has ended.

    While the request's body still comes in it is silent: the peer is sending and waits for nothing, and one TLS
    connection must not be read and written at once.

    Source: RFC 9110 section 15.2: a client reads any number of 1xx responses before the final one.
    """

    def __init__(self, stream: BufferedIOBase, body: Body) -> None:
        self._stream = stream
        self._body = body
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._ended.clear()
        self._thread = start_worker(self._beat, name="rckpt-heartbeat")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if not self._body.done:
                continue
            try:
                self._stream.write(_INTERIM)
            except OSError:
                return  # the peer is gone; the final answer will meet the same error
