"""Niceness of the agent's threads and of its session."""

import logging
import os
import threading
import time
from pathlib import Path

from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)

AUTOGROUP = Path("/proc/self/autogroup")
_OF_A_THREAD, _LOWEST = 5, 19
"""Without autogroups, an agent's threads at niceness 10 take a third of two busy cores (docs/measurements.md)."""
_TRIES, _TRY_AGAIN_S = 100, 0.11
"""The kernel accepts one change in a tenth of a second from all unprivileged processes together."""


def give_way(niceness: int) -> None:
    """Raises the niceness of this thread, and of threads that it starts, for the rest of their lives.

    `niceness`: 1 to 19, of the agent. A thread gets 5 more, as without autogroups each thread competes by itself. 0, or a
    value below the current niceness, does nothing. Only for threads that end with their work: an unprivileged thread cannot
    lower its niceness again. On Linux `setpriority` applies to a thread (setpriority(2), "C library/kernel differences").
    """
    thread = threading.get_native_id()
    wanted = min(niceness + _OF_A_THREAD, _LOWEST)
    if niceness and wanted > os.getpriority(os.PRIO_PROCESS, thread):
        os.setpriority(os.PRIO_PROCESS, thread, wanted)


def give_way_as_session(niceness: int) -> None:
    """Raises the niceness of this process's autogroup, soon and for good, if the process leads its own session.

    With autogroups the kernel shares processors between sessions (sched(7), "The autogroup feature"). The niceness of a
    thread then counts only inside its session, and an agent would get as much time as a rank. Without autogroups this does
    nothing. `niceness`: as in `give_way`.
    """
    if niceness and os.getsid(0) == os.getpid():
        start_worker(_tell_autogroup, niceness, name="rckpt-give-way")


def _tell_autogroup(niceness: int) -> None:
    refusal: OSError | None = None
    for _ in range(_TRIES):
        try:
            words = AUTOGROUP.read_text().split()  # "/autogroup-7 nice 0", or none
            if words and int(words[-1]) < niceness:
                AUTOGROUP.write_text(str(niceness))
        except FileNotFoundError:  # this kernel does not group by session
            return
        except OSError as exc:
            refusal = exc
            if not isinstance(exc, BlockingIOError):
                break
            time.sleep(_TRY_AGAIN_S)
        else:
            return
    log.warning("this agent's session keeps its full CPU share despite --nice: %s", refusal)
