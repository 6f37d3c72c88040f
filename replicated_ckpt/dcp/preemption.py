"""Preemption: a signal that any rank got, reported to all ranks at the same step."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from replicated_ckpt.dcp.c10d.group_pool import PooledGroup, acquire_group
from replicated_ckpt.dcp.c10d.watched_group import WatchedGroup
from replicated_ckpt.dcp.c10d.world import watch_group
from replicated_ckpt.errors import ConfigInvalid


class Preemption:
    """Catches signals until `close`. `agree` returns, at the same step on all ranks, whether any of them got one.

    A signal reaches the ranks at different steps, or only one of them. A rank that saved or left alone would leave the
    others waiting in their next collective. The ranks therefore reduce one number at each step, over a gloo group of
    their own.

    Raises:
        ConfigInvalid: there are signals to catch, and this is not the process's main thread.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.is_agreed = False
        self._pid = os.getpid()
        self._is_signalled = False
        self._flag = torch.zeros((), dtype=torch.int64, device="cpu")
        self._previous: dict[int, Any] = {}
        self._lent: PooledGroup | None = None
        self._watched: WatchedGroup | None = None
        if not names:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigInvalid(
                f"Only the main thread can catch {', '.join(names)}.",
                "Make the CheckpointManager in the main thread, or pass preempt_on=().",
            )
        self._lent = acquire_group()
        # After the group, whose making may fail: then no handler stays behind.
        for name in names:
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        """Sets a flag, and calls the earlier handler. Batch systems may send the same signal twice.

        In a forked child, which has no step at which to agree, the signal has its earlier effect.
        """
        previous = self._previous.get(number)
        # A data loader's worker, say: it must end as it would without a manager.
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
            # Sent again: the signal that arrived must still have its effect.
            os.kill(os.getpid(), number)
            return
        self._is_signalled = True
        # SIGINT's default handler raises KeyboardInterrupt, in the middle of a collective.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def agree(self) -> bool:
        """Whether any rank got a signal before this call. All ranks must call this, and get the same result.

        Once true it stays true, and later calls send no message.
        """
        if self._previous and not self.is_agreed:
            self._flag.fill_(int(self._is_signalled))
            if self._lent is not None:
                with self._lent.use():
                    self._watch(self._lent.group).reduce_to_max(self._flag)
            self.is_agreed = bool(self._flag)
        return self.is_agreed

    def _watch(self, group: Any) -> WatchedGroup:
        """The collectives of the group. They are made once, because the training loop calls `agree` at every step."""
        if self._watched is None:
            self._watched = watch_group(group)
        return self._watched

    def close(self) -> None:
        """Restores the earlier handlers, except those of C code, which Python cannot set again.

        Raises:
            ConfigInvalid: only the process's main thread can restore handlers; nothing has changed.
        """
        if self._previous and threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(each).name for each in self._previous)
            raise ConfigInvalid(
                f"Only the main thread can restore the earlier handlers of {names}.",
                "Call CheckpointManager.close in the main thread, or pass preempt_on=().",
            )
        self._watched = None
        if self._lent is not None:
            self._lent.close()
        while self._previous:
            number, previous = self._previous.popitem()
            # None: C code has set that handler, and Python cannot set it again.
            if previous is not None:
                signal.signal(number, previous)
