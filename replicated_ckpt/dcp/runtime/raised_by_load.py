"""Errors that end a load before DCP's first step: of our own class, and a CheckpointException as DCP's steps raise it."""

import functools
from traceback import extract_tb
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import ReplicatedCkptError


def as_checkpoint_exception(error: ReplicatedCkptError, rank: int) -> ReplicatedCkptError:
    """The error, which `except CheckpointException` catches too; its `failures` has it under this rank."""
    if isinstance(error, CheckpointException):
        return error
    own: Any = type(error)
    kind = _both(own)
    found: Any = kind.__new__(kind)
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
