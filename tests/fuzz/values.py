"""Random values, and their pickles by the picklers of C and Python."""

import collections
import io
import pickle
from collections.abc import Callable
from random import Random
from typing import Any


class Alike:
    """All instances have one hash, so a set of them has the same order for every reader."""

    def __hash__(self) -> int:
        return 1


class Plain(Alike):
    """Pickled as most instances are: created without arguments, and then given its attributes."""


class Other(Alike):
    """A second class like Plain."""


class Called(Alike):
    """The result of a function: pickled as a call, some with a state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "arguments"}
        return (call, self.arguments) if not state else (Called, self.arguments, state)


def call(*arguments: Any) -> Called:
    return Called(*arguments)


class Slotted:
    """An instance with slots, whose state has its own form."""

    __slots__ = ("left", "right")

    def __hash__(self) -> int:
        return 1

    def __init__(self) -> None:
        self.left: Any = None
        self.right: Any = None


class Listed(list[Any]):
    """A list with attributes."""


class Mapped(dict[Any, Any]):
    """A dictionary with attributes."""


KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in (Plain, Other, Called, Slotted, Listed, Mapped)},
    (call.__module__, call.__qualname__): call,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytes"): bytes,
    ("_codecs", "encode"): __import__("_codecs").encode,
    ("collections", "OrderedDict"): collections.OrderedDict,
}

_TEXTS = ("", "a", "fqn", "offset", "index", "relative_path", "\n", "é", "\udc80", "x" * 300, "y" * 70_000)
_NUMBERS = (0, 1, -1, 255, 256, 65535, 65536, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 100, -(1 << 70))
_FLOATS = (0.0, -0.0, 1.5, float("inf"), float("nan"))


class Maker:
    """Makes random values, which may contain earlier ones."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._made: list[Any] = []

    def value(self, depth: int = 4) -> Any:
        random = self._random
        if self._made and random.random() < 0.15:
            return random.choice(self._made)
        if depth <= 0 or random.random() < 0.4:
            return self._leaf()
        made = random.choice(_MAKERS)(self, depth - 1)
        self._made.append(made)
        return made

    def _leaf(self) -> Any:
        random = self._random
        kind = random.randrange(6)
        if kind == 0:
            return random.choice(_TEXTS[:-1]) if random.random() < 0.99 else _TEXTS[-1]
        if kind == 1:
            return random.choice(_NUMBERS) if random.random() < 0.5 else random.randrange(1 << random.randrange(1, 66))
        if kind == 2:
            return random.choice(_FLOATS)
        if kind == 3:
            return random.randbytes(random.choice((0, 1, 20, 300)))
        if kind == 4:
            return random.choice((None, True, False))
        return random.choice((Plain, call, set))

    def key(self) -> Any:
        key = self._leaf()
        return (key, self._leaf()) if self._random.random() < 0.2 else key

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self._random.choice((0, 1, 2, 3, 4, 12)))]

    def mapping(self, depth: int) -> dict[Any, Any]:
        return {self.key(): self.value(depth) for _ in range(self._random.choice((0, 1, 2, 3, 4, 12)))}

    def instance(self, depth: int) -> Any:
        """Mostly has few attributes with common names, which the follower reads in one step."""
        made = self._random.choice((Plain, Other))()
        names = self._random.sample(("fqn", "offset", "index", "relative_path", "length"), self._random.randrange(5))
        vars(made).update({name: self._random.choice((self._leaf, self._sized))() for name in names})
        if self._random.random() < 0.2:
            vars(made).update({f"name{at}": self.value(depth) for at in range(self._random.randrange(3))})
        return made

    def _sized(self) -> Any:
        """A call with one tuple of numbers, as sizes are pickled."""
        return Called(tuple(self._random.randrange(1 << 20) for _ in range(self._random.randrange(5))))

    def with_state(self, depth: int) -> Any:
        made = Called(*self.items(depth))
        if self._random.random() < 0.5:
            made.state = self.value(depth)  # type: ignore[attr-defined]
        return made

    def slotted(self, depth: int) -> Any:
        made = Slotted()
        made.left, made.right = self.value(depth), self._leaf()
        return made

    def list_keys(self, depth: int) -> Any:
        made = Listed(self.items(depth))
        vars(made).update({"name": self._leaf()} if self._random.random() < 0.5 else {})
        return made

    def mapped(self, depth: int) -> Any:
        made = self._random.choice((Mapped, collections.OrderedDict))(self.mapping(depth))
        vars(made).update({"name": self._leaf()} if self._random.random() < 0.5 else {})
        return made


_MAKERS: tuple[Callable[[Maker, int], Any], ...] = (
    *(Maker.items, Maker.mapping, Maker.instance, Maker.instance, Maker.with_state),
    *(Maker.slotted, Maker.list_keys, Maker.mapped),
    lambda maker, depth: tuple(maker.items(depth)),
    lambda maker, _: {maker.key() for _ in range(3)},
    lambda maker, _: frozenset(maker.key() for _ in range(3)),
    lambda maker, _: complex(1, 2),
)


def pickled(value: Any, random: Random) -> bytes:
    """Pickles with C's or Python's pickler, in a random protocol."""
    protocol = random.choice((2, 3, 4, 4, 4, 5))
    if random.random() < 0.7:
        return pickle.dumps(value, protocol)
    buffer = io.BytesIO()
    pickle._Pickler(buffer, protocol).dump(value)
    return buffer.getvalue()
