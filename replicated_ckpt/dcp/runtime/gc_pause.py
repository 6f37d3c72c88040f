"""Pauses Python's cyclic garbage collector while code makes many objects that the collector would not free.

A collection of the oldest generation visits every object of the process, and every thread waits for it: 0.1 s once torch
is imported. DCP's planning of a thousand tensors makes enough objects to trigger one.

A pause sets the collector's threshold to 0, and does not call `gc.disable`. Other code calls `gc.disable` and `gc.enable`
around work that no collection may interrupt, such as the capture of a CUDA graph. A `gc.enable` at the end of a pause
would allow collections there.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 10.0
"""A Pause ends by itself after this time: its owner may be waiting for other ranks, or have failed."""
WATCHER = "replicated-ckpt-collections"
"""The name of the thread that ends overdue pauses. It ends at most LONGEST_S after the last pause."""

_lock = threading.Lock()
_users = 0
_before = gc.get_threshold()


class Pause:
    """Keeps Python's cyclic garbage collector from running between `begin_pause` and `end_pause`, for at most LONGEST_S.

    Safe to call from several threads. The end of the last pause restores the thresholds, unless other code has set them
    meanwhile.
    """

    def begin_pause(self) -> None:
        """Begins the pause, or extends it to LONGEST_S from now. If no thread can be started, there is no pause."""
        global _watcher  # noqa: PLW0603 - one for the process
        with _lock:
            if _watcher is None:
                # Daemon: a pause without an end must not keep the process from exiting.
                watcher = threading.Thread(target=_end_late, name=WATCHER, daemon=True)
                try:
                    watcher.start()
                except RuntimeError:  # a pause that never ends would be worse than none
                    return
                _watcher = watcher
            if self not in _ends:
                _begin()
            _ends[self] = time.monotonic() + LONGEST_S

    def end_pause(self) -> None:
        """Ends the pause, if there is one."""
        with _lock:
            if _ends.pop(self, None) is not None:
                _end()


_ends: dict[Pause, float] = {}
_watcher: threading.Thread | None = None


@contextmanager
def pause_collections() -> Iterator[None]:
    """Prevents cyclic collections in this process during the block, however long it takes.

    With collections, unpickling the metadata of a million items takes three to four times as long.
    """
    with _lock:
        _begin()
    try:
        yield
    finally:
        with _lock:
            _end()


def _end_late() -> None:
    """The watcher thread: ends overdue pauses, until no pause is left."""
    global _watcher  # noqa: PLW0603 - as above
    while True:
        with _lock:
            now = time.monotonic()
            for pause in [pause for pause, end in _ends.items() if end <= now]:
                del _ends[pause]
                _end()
            if not _ends:
                _watcher = None
                return
            pause_s = min(_ends.values()) - now
        time.sleep(pause_s)


def _begin() -> None:
    global _users, _before  # noqa: PLW0603 - one set of thresholds for the process, and the count of those who need a pause
    if not _users:
        _before = gc.get_threshold()
        gc.set_threshold(0, *_before[1:])
    _users += 1


def _end() -> None:
    global _users  # noqa: PLW0603 - as above
    _users = max(0, _users - 1)  # a block that began before a fork may end in the child
    # Otherwise other code has set the thresholds meanwhile.
    if not _users and gc.get_threshold()[0] == 0:
        gc.set_threshold(*_before)


def _begin_anew() -> None:
    """In a forked child: the threads that end pauses, or that held the lock, exist only in the parent."""
    global _users, _lock, _watcher  # noqa: PLW0603 - the ones of this process
    _lock, _watcher = threading.Lock(), None
    _ends.clear()
    if _users:
        _users = 1
        _end()


os.register_at_fork(after_in_child=_begin_anew)
