"""Python's cyclic garbage collection, put off while millions of objects are made that all stay."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_users = 0
_was_enabled = False


@contextmanager
def put_off() -> Iterator[None]:
    """No cyclic collection of this process during the block; as it was before once the last such block has ended.

    Each collection walks through everything made so far: with it, unpickling the metadata of a million items takes three
    to four times as long.
    """
    global _users, _was_enabled  # noqa: PLW0603 - so is what they count: one switch for the process
    with _lock:
        if not _users:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _was_enabled:
                gc.enable()
