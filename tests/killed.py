"""A child process that dies at a failpoint."""

import os
import signal
import traceback
from collections.abc import Callable

from replicated_ckpt import failpoints


def killed_at(point: str, act: Callable[[], object]) -> None:
    """Calls `act` in a fork of this process, which is killed at the failpoint. `act` must not need other threads."""
    pid = os.fork()
    if pid == 0:
        with failpoints.arm(point, lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            try:
                act()
            finally:
                traceback.print_exc()  # what kept it from being killed
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
