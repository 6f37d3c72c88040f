"""Errors as ranks post them to each other: JSON, and of our own classes only. Nothing that is read here runs code."""

from collections.abc import Mapping
from typing import Any

from replicated_ckpt import errors
from replicated_ckpt.errors import PeerProtocolError, ReplicatedCkptError

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
        # Made once here: an error that the reader cannot make would reach it as a protocol error.
        _check(kind(*error.args))
    except (TypeError, ValueError, AttributeError):  # its own constructor took other arguments
        kind, made_from = ReplicatedCkptError, [str(error.message), str(error.hint)]
    return {"kind": kind.__name__, "args": made_from}


def unpack_error(fields: Any) -> ReplicatedCkptError:
    """The error that `pack_error` made these fields of: the same class, made from the same arguments.

    Raises:
        PeerProtocolError: they are of none.
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
    """Raises TypeError: it cannot be shown, as it was made from arguments of other types."""
    if not isinstance(error.message, str) or not isinstance(error.hint, str):
        raise TypeError("message and hint are not text")


def _pack(value: Any) -> Any:
    """A map goes as a list of pairs: keys may be ranks, which JSON's keys cannot be."""
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
