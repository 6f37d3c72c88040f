"""Finds and ends processes by a mark in their environment, which all descendants inherit, also detached ones."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MARK_VARIABLE = "REPLICATED_CKPT_DRILL_NODE"
POLL_S = 0.02


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM to the end of the block, which starts a process and records it.

    An interrupt between the two would leave an unrecorded child, without a mark until its exec. A signal that is ignored
    stays ignored. Does nothing outside the main thread, which alone receives signals.

    Raises:
        KeyboardInterrupt: after the block, if a signal came.
    """
    # Only the main thread may set handlers, and only it is interrupted.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # nohup and background shells ignore SIGINT: it must stay ignored.
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
        if heard:
            raise KeyboardInterrupt


def find_processes(prefix: str) -> tuple[int, ...]:
    """Ids of the living processes whose mark begins with `prefix`, this one excluded."""
    needle = f"{MARK_VARIABLE}={prefix}".encode()
    running = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return tuple(pid for pid in running if pid != os.getpid() and _has_mark(pid, needle))


def kill(prefix: str, limit_s: float) -> bool:
    """Sends SIGKILL to all marked processes until none is left, including children that they start meanwhile.

    Returns:
        whether none was left within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    # Repeated: a process may fork after it was listed.
    while pids := find_processes(prefix):
        for pid in pids:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop(prefix: str, limit_s: float) -> bool:
    """Sends SIGTERM once to all marked processes, and waits for them.

    Returns:
        whether all of them ended within `limit_s`.
    """
    for pid in find_processes(prefix):
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while find_processes(prefix):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to one process. A process that has ended is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _has_mark(pid: int, needle: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(entry.startswith(needle) for entry in environment.split(b"\0"))
