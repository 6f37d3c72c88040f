"""Python's cyclic garbage collection, put off while many objects are made that stay, or that go by themselves.

Each collection of the oldest generation walks through every object of the process: 0.1 s in one that has imported torch,
and every thread waits for it. DCP's planning of a thousand tensors makes enough objects to bring one about.

A pause sets the threshold of collections to 0, and not `gc.disable`: others switch that off and on around what a collection
must not come into, as the capture of a CUDA graph, and the end of a pause would switch it on for them.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 10.0
"""A Pause that is not ended ends by itself after so long: its owner may wait for other ranks, or have failed."""
NAME = "replicated-ckpt-collections"
"""Of the thread that ends one."""

_lock = threading.Lock()
_users = 0
_before = gc.get_threshold()


@contextmanager
def put_off() -> Iterator[None]:
    """No cyclic collection of this process during the block; as it was before once the last such block has ended.

    With collections, unpickling the metadata of a million items takes three to four times as long.
    """
    _begin()
    try:
        yield
    finally:
        _end()


class Pause:
    """No cyclic collection of this process from `begin` to `end`, which other code lies between, or for LONGEST_S.

    Safe to call from several threads. What is on when the last pause ends is what was on before the first.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """The pause begins, or goes on for another LONGEST_S."""
        timer = threading.Timer(LONGEST_S, self._end_late)
        timer.daemon = True
        timer.name = NAME
        timer.args = (timer,)
        with self._changing:
            try:
                timer.start()
            except RuntimeError:  # the process may have no more threads; without a pause the caller is slower, no more
                return
            before, self._timer = self._timer, timer
            if before is None:
                _begin()
            else:
                before.cancel()

    def end(self) -> None:
        """The pause is over, if there is one."""
        with self._changing:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
                _end()

    def _end_late(self, timer: threading.Timer) -> None:
        with self._changing:
            if self._timer is timer:
                self._timer = None
                _end()


def _begin() -> None:
    global _users, _before  # noqa: PLW0603 - one set of thresholds for the process, and the count of those who need a pause
    with _lock:
        if not _users:
            _before = gc.get_threshold()
            gc.set_threshold(0, *_before[1:])
        _users += 1


def _end() -> None:
    global _users  # noqa: PLW0603 - as above
    with _lock:
        if not _users:  # begun before a fork
            return
        _users -= 1
        if not _users:
            _restore()


def _restore() -> None:
    if gc.get_threshold()[0] == 0:  # else someone has set others meanwhile
        gc.set_threshold(*_before)


def _begin_anew() -> None:
    """In a forked child: the threads that would have ended the pauses were the parent's, and so was who held the lock."""
    global _users, _lock  # noqa: PLW0603 - the ones of this process
    _lock = threading.Lock()
    if _users:
        _restore()
    _users = 0


os.register_at_fork(after_in_child=_begin_anew)
