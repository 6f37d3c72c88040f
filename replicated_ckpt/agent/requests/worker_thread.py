"""Threads, and processes, that give way to others."""

import logging
import os
import threading
import time
from pathlib import Path

from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)

AUTOGROUP = Path("/proc/self/autogroup")
_OF_A_THREAD, _LOWEST = 5, 19
"""Where threads compete one by one, an agent's take a third of two busy processors at 10 (docs/measurements.md)."""
_TRIES, _TRY_AGAIN_S = 100, 0.11
"""From processes without rights, all together, the kernel takes one every tenth of a second."""


def give_way(niceness: int) -> None:
    """Lets others have the processor first, for the rest of this thread and for the threads that it starts.

    `niceness`: 1 to 19, of the agent; a thread gets 5 more, as each counts by itself where sessions do not. 0 does nothing,
    nor does what an agent that was started with `nice` has already. For threads that end with their work: without rights
    there is no way back, and asking for one is an error. On Linux `setpriority` is of a thread (setpriority(2), "C
    library/kernel differences").
    """
    thread = threading.get_native_id()
    wanted = min(niceness + _OF_A_THREAD, _LOWEST)
    if niceness and wanted > os.getpriority(os.PRIO_PROCESS, thread):
        os.setpriority(os.PRIO_PROCESS, thread, wanted)


def give_way_as_session(niceness: int) -> None:
    """Lets processes of other sessions have the processor first, soon and for good, if this one leads its own session.

    For where the kernel groups processes by session (sched(7), "The autogroup feature"): there the niceness of a thread
    counts among those of its session alone, and an agent in a session of its own has as much of a processor as the rank
    that it shares it with. Elsewhere this does nothing. `niceness`: as of `give_way`.
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
    log.warning("this agent's session keeps its share of the processors, whatever --nice says: %s", refusal)
