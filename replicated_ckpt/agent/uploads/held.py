"""Saves whose upload is held while they are removed: it could bring back, or take away, what the removal has left."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

HELD_WITHIN_S = 30.0
"""A removal waits that long for a request to the bucket that is under way; then what the upload brings goes after it."""


class UploadHeld(Exception):
    """The save is being removed: its upload lets go of it for now."""


class HeldUploads:
    """Which save the uploader works on, and which ones it is not to begin. Safe for concurrent use."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_work = ""
        self._held: Counter[str] = Counter()

    @contextmanager
    def work_on(self, save_id: str) -> Iterator[None]:
        """For the uploader, around all that it does in the bucket for one save. Raises UploadHeld: not now."""
        with self._changed:
            if save_id in self._held:
                raise UploadHeld
            self._at_work = save_id
        try:
            yield
        finally:
            with self._changed:
                self._at_work = ""
                self._changed.notify_all()

    @contextmanager
    def hold(self, save_id: str) -> Iterator[None]:
        """Inside, the save is not uploaded. What is under way ends first, if it does within HELD_WITHIN_S."""
        with self._changed:
            self._held[save_id] += 1
            self._changed.wait_for(lambda: self._at_work != save_id, HELD_WITHIN_S)
        try:
            yield
        finally:
            with self._changed:
                self._held -= Counter([save_id])

    def check(self, save_id: str) -> None:
        """Between two steps of an upload. Raises UploadHeld."""
        with self._changed:
            if save_id in self._held:
                raise UploadHeld
