"""Starting threads, and the error where the system allows a process no more of them."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

FEWER = (
    "Raise the limit of processes and threads (`ulimit -u`, pids.max of the container), or end programs that use many."
)
_ENDING = "interpreter shutdown"
"""In the error of an interpreter that exits. Up to Python 3.12.2 it starts no thread while it waits for others; 3.12.3
does. Source: github.com/python/cpython/issues/113964."""
_SOONER = (
    "Python was about to exit: wait for the save first (`future.result()`, `writer.wait()`), or use Python 3.12.3."
)


def start_worker(work: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
    """Runs `work` in a thread that does not keep the process alive; returns the thread.

    Raises:
        StoreUnavailable: the system gives no thread; nothing was begun.
    """
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    start_thread(thread)
    return thread


def start_thread(thread: threading.Thread) -> None:
    """Starts the thread. If the interpreter is exiting, that is logged too: nobody may read the error of that save.

    Raises:
        StoreUnavailable: the system has no thread; nothing was begun.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:  # at the limit of threads, or of memory
        is_ending = _ENDING in str(exc)
        hint = _SOONER if is_ending else FEWER
        error = StoreUnavailable("this process", "start", thread.name, f"it cannot start a thread: {exc}", hint)
        if is_ending:
            log.warning("a save or load failed, interrupted by the end of Python: %s", one_line(error))
        raise error from exc
