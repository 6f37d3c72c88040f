"""Errors that are sent to other processes: as JSON on the c10d store, and as pickles by DCP. An error that cannot be sent
would leave the other ranks waiting.
"""

import copyreg
import functools
import io
import pickle
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import CodeType, NoneType
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import errors
from replicated_ckpt.errors import AgentUnavailable, PeerProtocolError, RankFailed, ReplicatedCkptError, StoreError
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

    If only this package runs in a hook, an OSError becomes a StoreError. Errors of a disk or an agent get a note with
    the host, because roots have the same path on all nodes.
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
            # Roots have the same path on all nodes: without the host the error could come from any node.
            if isinstance(exc, StoreError | AgentUnavailable):
                exc.add_note(f"Raised on host {socket.gethostname()}.")
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
            value.failures.update({rank: make_sendable(failure) for rank, failure in value.failures.items()})
    return value


def dump(value: object) -> bytes:
    """As `pickle.dumps`, with None in place of code objects.

    From Python 3.14 on, the traceback summary that DCP sends with an error contains code objects, which pickle refuses.
    DCP itself removes them on torch 2.13 and newer, but not on 2.11.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, CodeType: lambda _: (NoneType, ())}
    pickler.dump(value)
    return stream.getvalue()


_KINDS: Mapping[str, type[ReplicatedCkptError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ReplicatedCkptError)
}
# No error of ours nests deeper; hostile JSON must not exhaust the stack.
_DEPTH_MAX = 4


def pack_error(error: ReplicatedCkptError) -> dict[str, Any]:
    """The error as JSON. A subclass from outside `replicated_ckpt.errors` becomes its nearest base class inside."""
    kind = next(base for base in type(error).__mro__ if _KINDS.get(base.__name__) is base)
    try:
        made_from = [_pack(argument) for argument in error.args]
        # A trial: an error that the reader cannot make would become a protocol error there.
        _check(kind(*error.args))
    except (TypeError, ValueError, AttributeError):  # its own constructor took other arguments
        kind, made_from = ReplicatedCkptError, [str(error.message), str(error.hint)]
    return {"kind": kind.__name__, "args": made_from}


def unpack_error(fields: Any) -> ReplicatedCkptError:
    """The error from the fields of `pack_error`: the same class, made from the same arguments.

    Raises:
        PeerProtocolError: the fields are not those of an error.
    """
    try:
        # Only our own error classes are made: other programs of the job's network can write to the c10d store.
        kind = _KINDS[fields["kind"]]
        error = kind(*(_unpack(argument, 0) for argument in fields["args"]))
        _check(error)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise PeerProtocolError(f"A rank posted {str(fields)[:200]!r} as its error: {type(exc).__name__}.") from exc
    return error


def _check(error: ReplicatedCkptError) -> None:
    """Raises TypeError: the error cannot be printed, because it was made from arguments of other types."""
    if not isinstance(error.message, str) or not isinstance(error.hint, str):
        raise TypeError("message and hint are not text")


def _pack(value: Any) -> Any:
    """A map becomes a list of pairs: its keys may be ranks, which JSON's keys cannot be."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"map": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(item) for item in value]
    raise TypeError(f"an error with an argument of type {type(value).__name__} cannot be posted")


def _unpack(value: Any, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError("nested too deep")
    if isinstance(value, Mapping):
        return {_key(key): _unpack(item, depth + 1) for key, item in value["map"]}
    if isinstance(value, list):
        return tuple(_unpack(item, depth + 1) for item in value)
    return value


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError("a key is neither text nor a number")
    return key
