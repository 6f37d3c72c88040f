"""Values made from the tree of a pickle. A name is looked up in tables of this process, and never imported."""

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from replicated_ckpt.core.pickles.tree import (
    Elements,
    Fields,
    FrozenElements,
    Made,
    Named,
    Pairs,
    PickleUnsafe,
    Stored,
    member_in,
)

Key = tuple[str, str]
"""Module and name of a class or function."""

_NAMES_CHARACTERS = 300


class UnknownName(PickleUnsafe):
    """A pickle names classes or functions that are in no table."""

    def __init__(self, *keys: Key) -> None:
        super().__init__(f"names {', '.join(map('.'.join, keys))[:_NAMES_CHARACTERS]}")
        self.keys = keys


class Values:
    """Makes the values of the nodes of one tree. A shared node is made once, so that its value is shared, too.

    The caller must have checked the tree's bounds: this class follows a deep or repeating tree to its end.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def find(self, key: Key) -> Any:
        """The object that a name means in this process.

        Raises:
            UnknownName: the name is not allowed.
        """
        raise UnknownName(key)

    def check_keys(self, keys: Sequence[Any]) -> None:
        """Raises PickleUnsafe if a dictionary or set with these hashable keys would take too long to fill."""

    def of(self, node: Any) -> Any:
        """The value of a node.

        Raises:
            PickleUnsafe: the node has no value, or a name in it is unknown.
        """
        make = _MAKE.get(type(node))
        if make is None:
            return node
        if id(node) not in self._known:
            self._known[id(node)] = make(self, node)
        return self._known[id(node)]

    def resolve_name(self, node: Named) -> Any:
        return self.find(key_of(node))

    def make(self, node: Made) -> Any:
        """The result of a call of a named class or function, with the state and the contents that follow it.

        Raises:
            PickleUnsafe: the call raised an error.
        """
        called, arguments = self.find(key_of(node.called)), self.of(node.arguments)
        state, contents = self.of(node.state), self.of(node.contents)
        # A function may return a shared object, such as a dtype: setting its state would change it for the whole process.
        if state is not None and not _makes_new_ones(called):
            raise PickleUnsafe(
                f"sets the state of an object of {node.called.path[:_NAMES_CHARACTERS]}, which may be shared"
            )
        try:
            return make_as_picklers_do(called, arguments, state, contents, is_new=node.is_new)
        # Classes that the user registered run their own code here.
        except Exception as exc:
            problem = f"{type(exc).__name__}: {exc}"[:_NAMES_CHARACTERS]
            raise PickleUnsafe(
                f"calls {node.called.path[:_NAMES_CHARACTERS]} with values that it refuses ({problem})"
            ) from exc

    def of_call(self, node: Made) -> Any:
        """The result of `make`, or the member of an enum."""
        member = member_in(node)
        return self.make(node) if member is None else self._member(node, *member)

    def _member(self, node: Made, named: Named, name: str) -> Enum:
        """The member of an enum, which pickles name as an attribute of its class."""
        # An attribute of any other class could be a function that no table lists.
        kind = self.find(key_of(named))
        if not isinstance(kind, type) or not issubclass(kind, Enum):
            raise UnknownName(key_of(node.called))
        if name not in kind.__members__:
            raise PickleUnsafe(f"names {name[:_NAMES_CHARACTERS]!r}, which is not a member of {named.path}")
        return kind[name]

    def load_stored(self, node: Stored) -> Any:
        # Only containers of tensors have storages; elsewhere an id is a sign of a forged pickle.
        del node
        raise PickleUnsafe("holds a persistent id")

    def tuple_of(self, node: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self.of(item) for item in node)

    def list_of(self, node: list[Any]) -> list[Any]:
        return [self.of(item) for item in node]

    def pairs(self, node: Pairs) -> dict[Any, Any]:
        keys = self._keys(node[::2])
        return dict(zip(keys, (self.of(value) for value in node[1::2]), strict=True))

    def fields(self, node: Fields) -> dict[str, Any]:
        return {name: self.of(value) for name, value in node.items()}

    def elements(self, node: Elements) -> set[Any]:
        return set(self._keys(node))

    def frozen_elements(self, node: FrozenElements) -> frozenset[Any]:
        return frozenset(self._keys(node))

    def _keys(self, nodes: Sequence[Any]) -> list[Any]:
        keys = [self.of(node) for node in nodes]
        # Hashed here: otherwise the dictionary would raise the TypeError, like an error of this program.
        try:
            for key in keys:
                hash(key)
        except TypeError as exc:
            raise PickleUnsafe(f"has an invalid key in a dictionary or set: {exc}") from exc
        # Before a dictionary is filled: keys that hash alike make that quadratic.
        self.check_keys(keys)
        return keys


_MAKE: dict[type, Callable[[Values, Any], Any]] = {
    Named: lambda values, node: values.resolve_name(node),
    Made: Values.of_call,
    Stored: lambda values, node: values.load_stored(node),
    tuple: Values.tuple_of,
    list: Values.list_of,
    Pairs: Values.pairs,
    Fields: Values.fields,
    Elements: Values.elements,
    FrozenElements: Values.frozen_elements,
}


def key_of(node: Named) -> Key:
    """Module and name in their present form: picklers of protocol 2 write the names of Python 2."""
    key = (node.module, node.name)
    module, name = NAME_MAPPING.get(key, key)
    return IMPORT_MAPPING.get(module, module), name


def _makes_new_ones(called: Any) -> bool:
    """Whether a call returns a new instance: a function's result or a member of an enum may be shared."""
    return isinstance(called, type) and not issubclass(called, Enum)


def make_as_picklers_do(called: Any, arguments: tuple[Any, ...], state: Any, contents: Any, *, is_new: bool) -> Any:
    """An instance, or the result of a call, with its contents and state as picklers set them. Source: Lib/pickle.py."""
    instance = called.__new__(called, *arguments) if is_new else called(*arguments)
    if isinstance(contents, dict):
        for key, value in contents.items():
            instance[key] = value
    elif contents is not None:
        instance.extend(contents)
    if state is None:
        return instance
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return instance
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    for part in (attributes, slots):
        if part is not None and not isinstance(part, dict):
            raise TypeError(f"a state is a dictionary, not {type(part).__name__}")
    if attributes is not None:
        vars(instance).update(attributes)  # also if empty: as in C, an instance without attributes raises
    for name, value in (slots or {}).items():
        setattr(instance, name, value)
    return instance
