"""What a save or load has failed with, in a line of a log: DCP's own text is the tracebacks of all ranks, one by one."""

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.core.one_line import one_line
from replicated_ckpt.errors import ReplicatedCkptError, SaveAborted
from replicated_ckpt.wording import plural

_RANKS_SHOWN_MAX = 3


def describe_failure(error: BaseException) -> str:
    """The error; of DCP's, each rank's, those that are no echo of another's first."""
    if not isinstance(error, CheckpointException) or isinstance(error, ReplicatedCkptError):
        return _describe(error)
    failures = [(isinstance(each, SaveAborted), rank, each) for rank, (each, _) in error.failures.items()]
    failures.sort(key=lambda failure: failure[:2])
    shown = [f"rank {rank}: {_describe(each)}" for _, rank, each in failures[:_RANKS_SHOWN_MAX]]
    left = len(failures) - len(shown)
    return "; ".join([*shown, *([f"and {plural(left, 'more rank')}"] if left > 0 else [])])


def _describe(error: BaseException) -> str:
    """With its notes, which name the host or the entry that it is about."""
    notes = "".join(f" ({note.rstrip('.')})" for note in getattr(error, "__notes__", ()))
    return one_line(f"{type(error).__name__}: {error}{notes}")
