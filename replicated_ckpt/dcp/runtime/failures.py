"""Errors as one line of a log: of a save or load, whose text by DCP is all tracebacks, and of a user's callback."""

import functools
import logging
from collections.abc import Callable
from traceback import extract_tb
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import ReplicatedCkptError, SaveAborted
from replicated_ckpt.wording import one_line, plural

log = logging.getLogger(__name__)

_RANKS_SHOWN_MAX = 3


def describe_failure(error: BaseException) -> str:
    """A description of the error. For DCP's error, it has the error of each rank; those that only repeat another rank's
    come last.
    """
    if not isinstance(error, CheckpointException) or isinstance(error, ReplicatedCkptError):
        return _describe(error)
    failures = [(isinstance(each, SaveAborted), rank, each) for rank, (each, _) in error.failures.items()]
    failures.sort(key=lambda failure: failure[:2])
    shown = [f"rank {rank}: {_describe(each)}" for _, rank, each in failures[:_RANKS_SHOWN_MAX]]
    left = len(failures) - len(shown)
    return "; ".join([*shown, *([f"and {plural(left, 'more rank')}"] if left > 0 else [])])


def _describe(error: BaseException) -> str:
    """With the error's notes, which name its host or entry."""
    notes = "".join(f" ({note.rstrip('.')})" for note in getattr(error, "__notes__", ()))
    return one_line(f"{type(error).__name__}: {error}{notes}")


def as_checkpoint_exception(error: ReplicatedCkptError, rank: int) -> ReplicatedCkptError:
    """The error, made so that `except CheckpointException` catches it, too. Its `failures` has it under this rank."""
    # An error passes several hooks on its way out; the first has wrapped it.
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
    """A class of both kinds, with the name and the text of ours. Pickled, it becomes ours and is made one of both again."""

    def reduced(self: Any) -> tuple[Any, ...]:
        ((rank, (error, _)),) = self.failures.items()
        return as_checkpoint_exception, (error, rank)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, CheckpointException), {**members, "__reduce__": reduced})


def call_back(function: Callable[[Any], object] | None, report: object) -> None:
    """Calls the user's function. An error of it is logged: the save or load has succeeded all the same."""
    if function is None:
        return
    try:
        function(report)
    except (Exception, CheckpointException):  # DCP's own is not an Exception
        log.exception("%r raised an exception; the save or load that it reports is not affected", function)
