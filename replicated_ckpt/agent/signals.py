"""SIGTERM and SIGINT as an agent takes them: in a thread.

A handler of Python's runs in the middle of what the main thread does, with its locks held.
"""

import signal
import socket
from collections.abc import Callable, Sequence

from replicated_ckpt.stores.thread_start import start_worker


def hear(numbers: Sequence[int], call: Callable[[int], None]) -> None:
    """Has `call(number)` run for each such signal from now on, one after the other, in a thread of its own.

    So it may take any lock. As a handler it would wait for ever for one that the main thread holds, which that of an
    `Event` is for a moment whenever a thread waits for it with a time-out. Once in a process, from its main thread.

    Raises:
        StoreUnavailable: the system gives no thread; signals mean what they meant before.
    """
    heard, said = socket.socketpair()
    start_worker(_listen, heard, call, name="rckpt-signals")
    said.setblocking(False)
    signal.set_wakeup_fd(said.detach(), warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # else the interpreter writes nothing to the wakeup descriptor
    # A rank that blocks them passes that on to the agent that it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _listen(heard: socket.socket, call: Callable[[int], None]) -> None:
    while number := heard.recv(1):
        call(number[0])
