"""What a pickle says, as a tree of values: nothing that it names is imported, nothing is called, and nothing is hashed.

Texts, bytes, numbers, None, lists and tuples are themselves. All else are the classes below. A part that the pickle
shares is one object in the tree, however often it is met.
"""

from typing import Any


class PickleUnsafe(ValueError):
    """Bytes that are no pickle as picklers write them, or one that costs more than its size allows.

    The message goes on from a subject: ".metadata", say.
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
    """A dictionary: key, value, key, value, in the order in which they are put into it."""

    __slots__ = ()


class Fields(dict[str, Any]):
    """A dictionary of which all keys are texts: the attributes of an instance."""

    __slots__ = ()


class Elements(list[Any]):
    """A set, and what is put into it."""

    __slots__ = ()


class FrozenElements(tuple[Any, ...]):
    """A frozen set."""

    __slots__ = ()


class Made:
    """What a call of something named would give: an instance (`is_new`: its class's `__new__` is called), or any value.

    `state` is what it is given afterwards, `contents` what is appended or set: both None, mostly. `value` is room for
    the reader of the tree.
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
    """A persistent id: what lies outside of the pickle, such as the elements of a tensor."""

    __slots__ = ("identity",)

    def __init__(self, identity: Any) -> None:
        self.identity = identity


LEAVES = frozenset({str, bytes, int, float, bool, type(None), Named})
"""Types of nodes that have nothing below them."""


def member_in(node: Made) -> tuple[Named, str] | None:
    """The class and the name of a member of an enum, if that is what a node is: `getattr(class, name)`.

    Python 3.11.0 to 3.11.3 pickle members so, others by their value. Source: `Enum.__reduce_ex__` in CPython's Lib/enum.py.
    """
    is_call = node.called.path in _GETATTR and node.state is None and node.contents is None and not node.is_new
    if not is_call or len(node.arguments) != 2:
        return None
    kind, name = node.arguments
    return (kind, name) if type(kind) is Named and type(name) is str else None


_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""Protocol 2 has the module's name in Python 2."""
