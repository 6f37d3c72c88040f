"""Reads a pickle with the package's follower and with the unpicklers of C and Python. Either all agree, or the follower
refuses the pickle.
"""

import io
import pickle
import struct
from typing import Any

from replicated_ckpt.core.pickles.follower import _Follower, follow
from replicated_ckpt.core.pickles.instances import Instances
from replicated_ckpt.core.pickles.tree import (
    Elements,
    Fields,
    FrozenElements,
    Made,
    Named,
    Pairs,
    PickleUnsafe,
    Stored,
    check_bounds,
)
from replicated_ckpt.dcp.objects.values import Key, Values
from tests.fuzz.values import KNOWN, Called


class Difference(AssertionError):
    """Two readers of the same bytes disagree."""


class KnownValues(Values):
    """Also finds the names in KNOWN."""

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
    """Turns off the fast path that follows an instance in one step."""

    def follow(self, cls: Named, position: int, limit: int) -> None:
        del cls, position, limit


def refusal_of(raw: bytes) -> str | None:
    """Why the follower refuses a pickle. None if the follower and both unpicklers make the same value of it.

    Raises:
        Difference: they make different values.
    """
    slowly = _slowly(raw)
    try:
        tree = follow(raw)
    except PickleUnsafe as exc:
        if slowly is not None:
            raise Difference(f"the fast path refuses what the slow one follows: {exc}") from exc
        return str(exc)
    if flattened(tree) != slowly:
        raise Difference("the fast path and the slow one make different trees")
    try:
        check_bounds(tree, len(raw))
        ours = flattened(KnownValues().of(tree))
    except PickleUnsafe as exc:
        return str(exc)
    readers: dict[str, Any] = {
        "C": _C(io.BytesIO(raw)),
        "C, which looks ahead,": _C(io.BufferedReader(io.BytesIO(raw), 16)),  # Python's unpickler never looks ahead
        "Python": _Python(io.BytesIO(raw)),
    }
    for reader, unpickler in readers.items():
        try:
            found = flattened(unpickler.load())
        except Exception as exc:
            raise Difference(f"{reader} refuses what the follower reads: {exc!r}") from exc
        if found != ours:
            raise Difference(f"{reader} makes {found!r}, the follower makes {ours!r}"[:2000])
    return None


def _slowly(raw: bytes) -> Any:
    """The tree, followed opcode by opcode."""
    follower = _Follower(raw)
    follower._instances = _NoInstances(raw, follower._memo, follower._shared)
    try:
        return flattened(follower.follow())
    except (PickleUnsafe, IndexError, ValueError):
        return None


def flattened(value: Any) -> list[Any]:
    """A value or a tree as a flat list of terms, which compare by type, by bits and by shared objects. A repeated
    object is a number.
    """
    flattener = _Flattener()
    flattener.add(value, 0)
    return flattener.terms


class _Flattener:
    """Builds the list of terms. A flat list is fast to build and to compare."""

    def __init__(self) -> None:
        self.terms: list[Any] = []
        self._numbers: dict[int, int] = {}

    def add(self, value: Any, depth: int) -> None:
        kind, terms = type(value), self.terms
        if kind in _SIMPLE:
            terms += (kind, value)
        elif kind is float:
            terms.append(struct.pack(">d", value))
        elif depth > _DEPTH_MAX or len(terms) > _TERMS_MAX:
            terms.append("...")
        elif kind is Named:
            terms += (kind, value.module, value.name)
        elif kind is tuple or kind is FrozenElements or not self._is_repeated(value):
            self._add_parts(value, depth)

    def _is_repeated(self, value: Any) -> bool:
        """Adds a number, and returns True, if the object is repeated. A call whose result is never changed may be one
        object or several, so it has no number.
        """
        if type(value) is Called or (type(value) is Made and not value.is_new):
            return False
        number = self._numbers.setdefault(id(value), len(self._numbers))
        if number < len(self._numbers) - 1:
            self.terms += ("again", number)
            return True
        return False

    def _add_parts(self, value: Any, depth: int) -> None:
        parts = _parts(value)
        self.terms += ("pairs" if type(value) in (Fields, Pairs) else type(value), len(parts))
        for part in parts:
            self.add(part, depth + 1)


def _parts(value: Any) -> Any:
    kind = type(value)
    if kind in _LISTS:
        return value
    if kind is Made:
        return (value.called, value.arguments, value.is_new, value.state, value.contents)
    if kind is Fields or kind is dict:
        return [part for pair in value.items() for part in pair]
    if kind is Stored:
        return (value.identity,)
    if kind is set or kind is frozenset:
        return sorted(repr(flattened(item)) for item in value)
    return _parts_of_instance(value)


def _parts_of_instance(value: Any) -> list[Any]:
    has_attributes = hasattr(value, "__dict__") or hasattr(value, "__slots__")
    if isinstance(value, type) or callable(value) or not (has_attributes or isinstance(value, complex)):
        return [repr(value)]
    parts: list[Any] = [value.real, value.imag] if isinstance(value, complex) else []
    if isinstance(value, dict):
        parts += [part for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple):
        parts += value
    parts += [part for pair in sorted(getattr(value, "__dict__", {}).items(), key=_name_of) for part in pair]
    slots = getattr(value, "__slots__", ())
    return [*parts, *(part for name in slots if hasattr(value, name) for part in (name, getattr(value, name)))]


def _name_of(attribute: tuple[Any, Any]) -> str:
    return attribute[0] if isinstance(attribute[0], str) else repr(flattened(attribute[0]))


_SIMPLE = frozenset({type(None), bool, int, str, bytes})
_LISTS = frozenset({list, tuple, Pairs, Elements, FrozenElements})
_DEPTH_MAX = 120
_TERMS_MAX = 60_000
