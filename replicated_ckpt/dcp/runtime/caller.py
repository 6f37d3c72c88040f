"""The line that a warning points to: the user's that called DCP or this package, not one in between."""

import sys
import warnings
from dataclasses import dataclass
from traceback import walk_stack

from replicated_ckpt.errors import ReplicatedCkptWarning
from replicated_ckpt.wording import escape_controls

_BETWEEN = {"replicated_ckpt", "torch", "concurrent", "contextlib", "functools", "multiprocessing", "threading"}
"""Packages with lines that a user cannot change: this one, DCP, and whatever runs them in threads and processes."""


@dataclass(frozen=True)
class Line:
    """A line of source, as `warnings` wants it."""

    filename: str
    number: int
    module: str


def find_line() -> Line | None:
    """The innermost line on this thread's stack that is the user's; None in a thread that DCP has started."""
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        module = str(frame.f_globals.get("__name__", "<unknown>"))
        if module.partition(".")[0] not in _BETWEEN:
            return Line(frame.f_code.co_filename, frame.f_lineno, module)
    return None


def warn(message: str, otherwise: Line | None = None) -> None:
    """Warns at the user's line. If the stack has none, at `otherwise`, such as the line where the writer or reader was
    made.
    """
    # A checkpoint's name may have control characters of a hostile writer, which a terminal would interpret.
    line, message = find_line() or otherwise, escape_controls(message)
    if line is None:
        warnings.warn(message, ReplicatedCkptWarning, stacklevel=2)
        return
    module = sys.modules.get(line.module)
    # The module's own registry, so that the filters "once" and "default" work as for a warning of its line.
    registry = {} if module is None else vars(module).setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, ReplicatedCkptWarning, line.filename, line.number, line.module, registry)


_CALLS_BACK = {"replicated_ckpt.dcp.runtime.failures", "replicated_ckpt.dcp.manager"}
_HANDS_ON = "replicated_ckpt.dcp.preemption"


def is_interrupting() -> bool:
    """Whether the user's line interrupts code of this room, as a signal handler does. A callback does not interrupt it.

    The code below it on the stack may hold a lock that the call would wait for.
    """
    is_users = False
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        module = str(frame.f_globals.get("__name__", "<unknown>"))
        if is_users and module in _CALLS_BACK:
            return False
        if is_users and module.startswith("replicated_ckpt.dcp.") and module != _HANDS_ON:
            return True
        is_users = is_users or module.partition(".")[0] not in _BETWEEN
    return False
