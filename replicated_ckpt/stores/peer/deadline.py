"""A deadline for a whole exchange: heartbeats show that a peer is alive, not that its work will ever end."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.thread_start import start_worker


def is_time_out(error: BaseException | None) -> bool:
    """Whether the error is a time-out of a peer: another request soon would cost another time-out."""
    return isinstance(error, StoreUnavailable) and isinstance(error.__cause__, TimeoutError)


@contextmanager
def limit_time(connected: socket.socket | None, seconds: float) -> Iterator[None]:
    """Shuts the connection down after `seconds`. The block's error then becomes a TimeoutError.

    A StoreUnavailable of the block stays one, with a TimeoutError as its cause.

    Raises:
        StoreUnavailable: the system has no thread for the watch; the block was not begun.
    """
    ended, is_broken = threading.Event(), threading.Event()
    late = f"it has not ended within {seconds:.0f} s"

    def watch() -> None:
        if not ended.wait(seconds) and connected is not None:
            is_broken.set()
            with suppress(OSError):  # closed meanwhile: the block has ended
                # The socket's own method: TLS's would switch to plain text.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

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
