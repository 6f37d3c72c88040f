"""A word on standard error for a user whose command waits for a bucket: which one, and that it has not hung."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replicated_ckpt.stores.thread_start import start_thread

SAID_AFTER_S = 3.0


@contextmanager
def say_if_slow(url: str) -> Iterator[None]:
    """Says after a moment that the command waits for `url`, if the block is not over by then."""
    timer = threading.Timer(SAID_AFTER_S, _say, [url])
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    finally:
        timer.cancel()


def _say(url: str) -> None:
    print(
        f"waiting for {url} since {SAID_AFTER_S:g} s; the command stops waiting for a silent endpoint after a minute",
        file=sys.stderr,
        flush=True,
    )
