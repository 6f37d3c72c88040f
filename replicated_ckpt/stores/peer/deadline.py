"""A deadline over a whole exchange: heartbeats show that a peer lives, not that its work will ever end."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def give_up_after(connected: socket.socket | None, seconds: float) -> Iterator[None]:
    """Breaks the connection when the block lasts longer: whoever waits on it then gets an OSError or an early end."""
    ended = threading.Event()

    def watch() -> None:
        if not ended.wait(seconds) and connected is not None:
            with suppress(OSError):  # closed meanwhile: there is nothing to break
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not TLS's own, which would go on in the clear

    thread = threading.Thread(target=watch, name="rckpt-deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
