"""Threads that end with their work, and what is said where the system gives no more of them."""

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
