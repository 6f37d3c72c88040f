"""Whether a file is open elsewhere, in this process or in any other."""

import fcntl
import os
import signal


def is_open_elsewhere(fd: int) -> bool:
    """Whether the file behind `fd`, which is open for writing, is open or mapped by anything else; True if none can tell.

    The kernel grants a lease for writing only on a file that nothing else has open. It is given back at once. An open
    of the file meanwhile waits for that, and sends this process SIGURG, which is ignored by default; SIGIO, which it would
    send otherwise, ends a process. Source: Linux fcntl(2), F_SETLEASE; `check_conflicting_open` in fs/locks.c.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:  # EAGAIN: it is open elsewhere; others: this file system, or container, has no leases
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_sole_name(status: os.stat_result) -> bool:
    """Whether a file has one name only, and is this user's."""
    return status.st_nlink == 1 and status.st_uid == os.geteuid()
