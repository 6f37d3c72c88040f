"""What is said where the system gives a process no more threads."""

import threading

from replicated_ckpt.errors import StoreUnavailable

_FEWER = "Raise the limit of processes and threads (`ulimit -u`, pids.max of the container), or end what has too many."


def start_thread(thread: threading.Thread) -> None:
    """Starts it.

    Raises:
        StoreUnavailable: the system gives no thread; nothing was begun.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:
        raise StoreUnavailable("this process", "start", thread.name, f"it gets no thread: {exc}", _FEWER) from exc
