"""Threads that end with their work, what is said where the system gives no more of them, and threads that give way."""

import os
import threading
from collections.abc import Callable
from typing import Any

from replicated_ckpt.errors import StoreUnavailable

_FEWER = "Raise the limit of processes and threads (`ulimit -u`, pids.max of the container), or end what has too many."


def start_worker(work: Callable[..., object], *arguments: Any, name: str) -> None:
    """Runs `work` in a thread that does not keep the process alive.

    Raises:
        StoreUnavailable: the system gives no thread; nothing was begun.
    """
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:
        raise StoreUnavailable("this process", "start", name, f"it gets no thread: {exc}", _FEWER) from exc


def give_way(niceness: int) -> None:
    """Lets others have the processor first, for the rest of this thread and for the threads that it starts.

    `niceness`: 1 to 19; 0 does nothing, nor does what an agent that was started with `nice` has already. For threads that
    end with their work: without rights there is no way back, and asking for one is an error. On Linux `setpriority` is of
    a thread (setpriority(2), "C library/kernel differences").
    """
    thread = threading.get_native_id()
    if niceness > max(0, os.getpriority(os.PRIO_PROCESS, thread)):
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
