"""The log of an agent that ranks started: one file of bounded size, and its predecessor."""

import logging
import os
import sys
from pathlib import Path

from replicated_ckpt.errors import StoreDenied, StoreError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_link, is_there
from replicated_ckpt.wording import one_line

LOG_NAME = "log"
LOG_BYTES_MAX = 8 << 20
"""Size of each of the two files. The current one may exceed it by one record, and grows to twice it if no new file can be
made.
"""
_OLDER_SUFFIX = ".1"
_MESSAGE_CHARS_MAX = 10_000
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def open_log(directory: Path) -> int:
    """A descriptor that appends to the log. A full log is first renamed, and a new one begun.

    Raises:
        StoreDenied: a symbolic link is in its place. StoreError: of the node's own disk.
    """
    path = directory / LOG_NAME
    with translate_errors(str(directory), "open", LOG_NAME):
        if is_there(path) and path.lstat().st_size >= LOG_BYTES_MAX:
            path.replace(path.with_name(LOG_NAME + _OLDER_SUFFIX))
        # A link could send the log, with names of hosts and paths, into any file of this user.
        if is_link(path):
            raise StoreDenied(str(directory), "open", LOG_NAME, "it is a symbolic link", f"Remove {path}.")
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class _OneLineFormatter(logging.Formatter):
    """Formats a record's message as one line, because it may quote text that a peer has chosen. A traceback follows it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        record.message = one_line(record.message, _MESSAGE_CHARS_MAX)
        return super().formatMessage(record)


class BoundedLog(logging.StreamHandler):  # type: ignore[type-arg]  # generic in its stub alone
    """Logs to standard error. If standard error is the log of `directory`, a full log is continued in a new file."""

    def __init__(self, directory: Path) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_OneLineFormatter(_FORMAT))
        self._directory = directory
        self._is_own = _is_log(directory)

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: a thread that logs an error of the disk must not end because of that error."""
        size_bytes = os.fstat(sys.stderr.fileno()).st_size if self._is_own else 0
        if size_bytes >= LOG_BYTES_MAX and self._start_new_file():
            size_bytes = 0
        # If no new file can be made, the log ends here rather than fill the disk.
        if size_bytes < 2 * LOG_BYTES_MAX:
            super().emit(record)

    def _start_new_file(self) -> bool:
        """Redirects standard output and error to a new file. False: no file can be made now."""
        try:
            fd = open_log(self._directory)
        except StoreError:
            return False
        # By dup2: fatal errors, which C code prints to the descriptor, must go to the new file, too.
        for number in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(fd, number)
        os.close(fd)
        return True


def _is_log(directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(sys.stderr.fileno()), (directory / LOG_NAME).stat())
    except OSError:
        return False
