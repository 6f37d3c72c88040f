"""Whose line a warning is about: the user's that called DCP or this package, not one in between."""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.errors import ReplicatedCkptWarning

_BETWEEN = {"replicated_ckpt", "torch", "concurrent", "contextlib", "functools", "multiprocessing", "threading"}
"""Packages whose lines nobody can act on: this one, DCP, and what runs them in threads and processes."""


@dataclass(frozen=True)
class Line:
    """A line of source, as `warnings` wants it; `variables` are the globals of its module."""

    filename: str
    number: int
    variables: dict[str, Any]


def find_line() -> Line | None:
    """The innermost line on this thread's stack that is the user's; None in a thread that DCP has started."""
    frame = sys._getframe(1)  # noqa: SLF001 - the documented CPython call for it
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def warn(message: str, otherwise: Line | None = None) -> None:
    """Warns at the user's line; where the stack has none, at `otherwise`: where the writer or reader was made, say."""
    line = find_line() or otherwise
    if line is None:
        warnings.warn(message, ReplicatedCkptWarning, stacklevel=2)
        return
    registry = line.variables.setdefault("__warningregistry__", {})
    module = str(line.variables.get("__name__", "<unknown>"))
    warnings.warn_explicit(message, ReplicatedCkptWarning, line.filename, line.number, module, registry)
