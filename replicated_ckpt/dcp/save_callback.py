"""Calling the user's `on_save`, and knowing whether a call of the manager comes out of it."""

import threading
from collections.abc import Callable

from replicated_ckpt.config import check_callable
from replicated_ckpt.dcp.save.report import SaveReport
from replicated_ckpt.errors import ConfigInvalid


class SaveCallback:
    """Calls `on_save`. In the thread of an asynchronous save it must not wait for that save, which waits for it."""

    def __init__(self, on_save: Callable[[SaveReport], object] | None) -> None:
        check_callable("on_save", on_save)
        self._on_save = on_save
        self._called_in: set[int] = set()
        self._saved_from: int | None = None

    def __call__(self, report: SaveReport) -> None:
        self._called_in.add(threading.get_ident())  # two tiers' saves may end at the same time
        try:
            if self._on_save is not None:
                self._on_save(report)
        finally:
            self._called_in.discard(threading.get_ident())

    def begin(self) -> None:
        """The manager's own thread is about to save."""
        self._saved_from = threading.get_ident()

    def check_not_inside(self, call: str) -> None:
        """Raises ConfigInvalid: `on_save` of an asynchronous save makes this call."""
        caller = threading.get_ident()
        if caller in self._called_in and caller != self._saved_from:
            raise ConfigInvalid(
                f"CheckpointManager.{call} was called by on_save of an asynchronous save, for which it would wait.",
                "Have on_save note what is to be done, and do it in the training loop, on every rank.",
            )
