"""Makes errors that are raised in DCP's hooks picklable: DCP sends them to the other ranks by pickle, and an error that
fails there leaves these ranks waiting.
"""

import copyreg
import functools
import io
import pickle
import socket
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType, NoneType
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import AgentUnavailable, RankFailed, StoreError
from replicated_ckpt.stores.files.durable import translate_errors

_OWN_HOOKS = (
    "set_up_storage_writer",
    "finish",
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
)
_HOOKS_WITH_PLANNER = ("write_data", "read_data")
Class = TypeVar("Class", bound=type)


def make_picklable(storage: Class) -> Class:
    """Has the hooks of a storage writer or reader raise RankFailed in place of an error that cannot be sent.

    An OSError out of a hook in which nothing but this package runs is a StoreError. What a disk or an agent refused
    names the host below it: roots have one path on all nodes.
    """
    for name in (*_OWN_HOOKS, *_HOOKS_WITH_PLANNER):
        # Only hooks of this very class: an inherited one is wrapped already.
        if name in vars(storage):
            setattr(storage, name, _make_picklable(vars(storage)[name], is_own=name in _OWN_HOOKS))
    return storage


def _make_picklable(hook: Callable[..., Any], *, is_own: bool) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with (
                translate_errors(str(self.config.root), hook.__name__, self.checkpoint_id) if is_own else nullcontext()
            ):
                return hook(self, *args, **kwargs)
        except BaseException as exc:
            # Roots have one path on all nodes: without the host the error could be of any.
            if isinstance(exc, StoreError | AgentUnavailable):
                exc.add_note(f"Met on host {socket.gethostname()}.")
            if not can_be_sent(exc):
                raise _describe(hook.__name__, exc) from exc
            raise

    return call


def can_be_sent(error: BaseException) -> bool:
    """Whether the error survives being sent to another process by pickle."""
    try:
        # Both directions: an error whose constructor takes other arguments fails only when another rank loads it.
        pickle.loads(pickle.dumps(error))  # noqa: S301 - of this very process
    except Exception:  # noqa: BLE001 - its own code runs in both directions
        return False
    return True


def _describe(what: str, error: BaseException) -> RankFailed:
    return RankFailed(f"{what} failed with {type(error).__name__}: {error}")


def make_sendable(value: Any) -> Any:
    """Replaces each error that cannot be pickled by RankFailed, in a value that a rank sends in a step of DCP.

    DCP sends errors of its planners, too: an error with its traceback, or by rank in a CheckpointException.
    """
    match value:
        case (BaseException() as error, traceback) if not can_be_sent(error):
            return _describe("A step of the save or load", error), traceback
        case CheckpointException():
            value.failures.update({rank: make_sendable(told) for rank, told in value.failures.items()})
    return value


def dump(value: object) -> bytes:
    """As `pickle.dumps`, with None in the place of code.

    From Python 3.14 on, code is in the summary of a traceback that DCP sends with an error, and pickle refuses it. DCP
    itself takes it out on torch 2.13 and newer, and not on 2.11.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, CodeType: lambda _: (NoneType, ())}
    pickler.dump(value)
    return stream.getvalue()
