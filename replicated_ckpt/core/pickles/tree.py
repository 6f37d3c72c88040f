"""The content of a pickle as a tree of values. Its names are not imported, its calls are not made, its keys not hashed.

Texts, bytes, numbers, None, lists and tuples stay as they are. Everything else is one of the classes below. A shared part
is one object in the tree, however often the pickle refers to it.
"""

from typing import Any


class PickleUnsafe(ValueError):
    """Bytes that are no pickle as picklers write them, or one whose reading exceeds the limits for its size.

    The message continues after a subject, as in ".metadata".
    """


class Named:
    """A name of a class, a function or a value."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


class Pairs(list[Any]):
    """A dictionary: key, value, key, value, in the order of their insertion."""

    __slots__ = ()


class Fields(dict[str, Any]):
    """A dictionary whose keys are all texts: the attributes of an instance."""

    __slots__ = ()


class Elements(list[Any]):
    """A set, with its elements in the order of their insertion."""

    __slots__ = ()


class FrozenElements(tuple[Any, ...]):
    """A frozen set."""

    __slots__ = ()


class Made:
    """The result of a call of a name: an instance (`is_new`: of the class's `__new__`), or any value.

    `state` is its state from BUILD, `contents` its appended or set items; both are mostly None. Readers of the tree may
    store their own `value`.
    """

    __slots__ = ("arguments", "called", "contents", "is_new", "state", "value")

    def __init__(self, called: Named, arguments: tuple[Any, ...], *, is_new: bool) -> None:
        self.called = called
        self.arguments = arguments
        self.is_new = is_new
        self.state: Any = None
        self.contents: list[Any] | None = None
        self.value: Any = None


class Stored:
    """A persistent id: a reference to data outside the pickle, such as the elements of a tensor."""

    __slots__ = ("identity",)

    def __init__(self, identity: Any) -> None:
        self.identity = identity


LEAVES = frozenset({str, bytes, int, float, bool, type(None), Named})
"""Types of nodes without children."""


def member_in(node: Made) -> tuple[Named, str] | None:
    """The class and the name of a member of an enum, if the node is one: `getattr(class, name)`.

    Python 3.11.0 to 3.11.3 pickle members so, others by their value. Source: `Enum.__reduce_ex__` in CPython's Lib/enum.py.
    """
    is_call = node.called.path in _GETATTR and node.state is None and node.contents is None and not node.is_new
    if not is_call or len(node.arguments) != 2:
        return None
    kind, name = node.arguments
    return (kind, name) if type(kind) is Named and type(name) is str else None


_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""Protocol 2 uses the module's name of Python 2."""
