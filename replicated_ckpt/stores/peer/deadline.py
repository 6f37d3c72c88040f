"""A deadline over a whole exchange: heartbeats show that a peer lives, not that its work will ever end."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.thread_start import start_worker


def is_time_out(error: BaseException | None) -> bool:
    """Whether a peer let a time-out pass: to ask it again soon costs another one."""
    return isinstance(error, StoreUnavailable) and isinstance(error.__cause__, TimeoutError)


@contextmanager
def limit_time(connected: socket.socket | None, seconds: float) -> Iterator[None]:
    """Breaks the connection when the block lasts longer; what the block meets then becomes a TimeoutError.

    Where it was translated already it stays a StoreUnavailable, of that: nothing else says that the peer lives.

    Raises:
        StoreUnavailable: the system gives no thread for it; the block was not begun.
    """
    ended, is_broken = threading.Event(), threading.Event()
    late = f"it has not ended within {seconds:.0f} s"

    def watch() -> None:
        if not ended.wait(seconds) and connected is not None:
            is_broken.set()
            with suppress(OSError):  # closed meanwhile: there is nothing to break
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not TLS's own, which would go on in the clear

    start_worker(watch, name="rckpt-deadline")
    try:
        yield
    except (OSError, http.client.HTTPException) as exc:
        if is_broken.is_set():
            raise TimeoutError(late) from exc
        raise
    except StoreUnavailable as exc:
        if is_broken.is_set():
            raise StoreUnavailable(exc.store, exc.op, exc.key, late) from TimeoutError(late)
        raise
    finally:
        ended.set()
