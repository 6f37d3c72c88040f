"""The boundary to the user's code: the line that a warning points to, callbacks, and errors as the user sees them."""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from traceback import extract_tb, walk_stack
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import ReplicatedCkptError, ReplicatedCkptWarning, SaveAborted
from replicated_ckpt.wording import escape_controls, one_line, plural

log = logging.getLogger(__name__)

_BETWEEN = {"replicated_ckpt", "torch", "concurrent", "contextlib", "functools", "multiprocessing", "threading"}
"""Packages with lines that a user cannot change: this one, DCP, and whatever runs them in threads and processes."""


@dataclass(frozen=True)
class Line:
    """A line of source, with the fields that `warnings` takes."""

    filename: str
    number: int
    module: str


def find_line() -> Line | None:
    """The innermost line of user code on this thread's stack. None in a thread that DCP has started."""
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


_MANAGER = "replicated_ckpt.dcp.manager"
_HANDS_ON = "replicated_ckpt.dcp.preemption"


def is_interrupting() -> bool:
    """Whether user code that interrupted this package, such as a signal handler, made this call. A callback does not count.

    The interrupted code may hold a lock for which the call would wait forever.
    """
    is_users = False
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented CPython call for it
        module = str(frame.f_globals.get("__name__", "<unknown>"))
        if is_users and (module == _MANAGER or (module, frame.f_code.co_name) == (__name__, call_back.__name__)):
            return False
        if is_users and module.startswith("replicated_ckpt.dcp.") and module != _HANDS_ON:
            return True
        is_users = is_users or module.partition(".")[0] not in _BETWEEN
    return False


_RANKS_SHOWN_MAX = 3


def describe_failure(error: BaseException) -> str:
    """The error in one line. For a CheckpointException it lists the errors by rank: at most three, and SaveAborted last,
    because that only follows from another rank's error.
    """
    if not isinstance(error, CheckpointException) or isinstance(error, ReplicatedCkptError):
        return _describe(error)
    failures = [(isinstance(each, SaveAborted), rank, each) for rank, (each, _) in error.failures.items()]
    failures.sort(key=lambda failure: failure[:2])
    shown = [f"rank {rank}: {_describe(each)}" for _, rank, each in failures[:_RANKS_SHOWN_MAX]]
    left = len(failures) - len(shown)
    return "; ".join([*shown, *([f"and {plural(left, 'more rank')}"] if left > 0 else [])])


def _describe(error: BaseException) -> str:
    """Class, text and notes of an error. The notes name its host or entry."""
    notes = "".join(f" ({note.rstrip('.')})" for note in getattr(error, "__notes__", ()))
    return one_line(f"{type(error).__name__}: {error}{notes}")


def as_checkpoint_exception(error: ReplicatedCkptError, rank: int) -> ReplicatedCkptError:
    """The same error, which `except CheckpointException` catches, too. Its `failures` has the error under this rank."""
    # An error may pass several hooks on its way out, and the first has wrapped it.
    if isinstance(error, CheckpointException):
        return error
    own: Any = type(error)
    kind = _both(own)
    found: Any = kind.__new__(kind)
    # Not by its constructor: that takes other arguments than `args` for some of our errors.
    found.args = error.args
    vars(found).update(vars(error), _failures={rank: (error, extract_tb(error.__traceback__))})
    both: ReplicatedCkptError = found.with_traceback(error.__traceback__)
    return both


@functools.cache
def _both(kind: Any) -> Any:
    """A class that inherits from our error class and from CheckpointException, with the name of ours.

    A pickle of its instance contains the original error, which unpickling converts again.
    """

    def reduced(self: Any) -> tuple[Any, ...]:
        ((rank, (error, _)),) = self.failures.items()
        return as_checkpoint_exception, (error, rank)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, CheckpointException), {**members, "__reduce__": reduced})


def call_back(function: Callable[[Any], object] | None, report: object) -> None:
    """Calls the user's function, if there is one. Its error is only logged: it does not affect the save or load."""
    if function is None:
        return
    try:
        function(report)
    except (Exception, CheckpointException):  # a CheckpointException is no Exception
        log.exception("%r raised an exception; the save or load that it reports is not affected", function)
