"""What a pickle makes, by the follower and by the unpicklers of C and of Python: all alike, or the follower refuses it."""

import io
import pickle
import struct
from typing import Any

from replicated_ckpt.core.pickles.bounds import check_bounds
from replicated_ckpt.core.pickles.follower import _Follower, follow
from replicated_ckpt.core.pickles.instances import Instances
from replicated_ckpt.core.pickles.tree import Elements, Fields, FrozenElements, Made, Named, Pairs, PickleUnsafe, Stored
from replicated_ckpt.dcp.objects.values import Key, Values
from tests.fuzz.values import KNOWN


class Difference(AssertionError):
    """Two readers of the same bytes do not agree."""


class KnownValues(Values):
    """Finds what is in KNOWN."""

    def find(self, key: Key) -> Any:
        return KNOWN[key] if key in KNOWN else super().find(key)


class _C(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _known(module, name)


class _Python(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _known(module, name)


def _known(module: str, name: str) -> Any:
    key = ("builtins" if module == "__builtin__" else module, name)
    if key not in KNOWN:
        raise pickle.UnpicklingError(f"{key} is unknown")
    return KNOWN[key]


class _NoInstances(Instances):
    """Follows nothing in one step."""

    def follow(self, cls: Named, position: int, limit: int) -> None:
        del cls, position, limit


def refusal_of(raw: bytes) -> str | None:
    """Why the follower refuses a pickle. None: it and both unpicklers make the same of it.

    Raises:
        Difference: they do not.
    """
    slowly = _slowly(raw)
    try:
        tree = follow(raw)
    except PickleUnsafe as exc:
        if slowly is not None:
            raise Difference(f"what is followed step by step is refused in one: {exc}") from exc
        return str(exc)
    if told(tree) != slowly:
        raise Difference("what is followed in one step differs from what is followed step by step")
    try:
        check_bounds(tree, len(raw))
        ours = told(KnownValues().of(tree))
    except PickleUnsafe as exc:
        return str(exc)
    readers: dict[str, Any] = {"C": _C, "Python": _Python}
    for reader, unpickler in readers.items():
        for way, file in (("whole", io.BytesIO(raw)), ("peeking", io.BufferedReader(io.BytesIO(raw), 16))):
            try:
                found = told(unpickler(file).load())
            except Exception as exc:
                raise Difference(f"{reader} ({way}) refuses what is followed: {exc!r}") from exc
            if found != ours:
                raise Difference(f"{reader} ({way}) makes {found!r}, the follower {ours!r}"[:2000])
    return None


def _slowly(raw: bytes) -> Any:
    """The tree opcode by opcode."""
    follower = _Follower(raw)
    follower._instances = _NoInstances(raw, follower._memo, follower._shared)
    try:
        return told(follower.follow())
    except (PickleUnsafe, IndexError, ValueError):
        return None


def told(value: Any) -> Any:
    """A value, or a tree, in terms that compare by type and bit; what is met again is a number."""
    return _Teller().of(value, 0)


class _Teller:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._left = 20_000

    def of(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth > 120 or self._left < 0:
            return "..."
        if isinstance(value, float):
            return struct.pack(">d", value)
        if value is None or isinstance(value, bool | int | str | bytes):
            return (type(value), value)
        if isinstance(value, Named):
            return ("named", value.module, value.name)
        if isinstance(value, type) or callable(value):
            return ("known", repr(value))
        return (_kind(value), *(self.of(part, depth + 1) for part in _parts(value)))


def _kind(value: Any) -> str:
    """Fields and pairs tell the same, in two ways."""
    return "pairs" if type(value) in (Fields, Pairs) else type(value).__name__


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Made):
        return [value.called, value.arguments, value.is_new, value.state, value.contents]
    if isinstance(value, Stored):
        return [value.identity]
    if isinstance(value, Fields):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, Pairs | Elements | FrozenElements):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted((told(item) for item in value), key=repr)
    own = vars(value) if hasattr(value, "__dict__") else {}
    slots = [(name, getattr(value, name)) for name in getattr(value, "__slots__", ()) if hasattr(value, name)]
    items: list[Any] = list(value.items()) if isinstance(value, dict) else []
    items += list(value) if isinstance(value, list | tuple) else []
    items += [value.real, value.imag] if isinstance(value, complex) else []
    return [*items, *sorted(own.items(), key=_name_of), *slots]


def _name_of(attribute: tuple[Any, Any]) -> str:
    return attribute[0] if isinstance(attribute[0], str) else repr(told(attribute[0]))
