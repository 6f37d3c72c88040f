"""The content of a pickle as a tree of values. Its names are not imported, its calls are not made, its keys not hashed.

Texts, bytes, numbers, None, lists and tuples stay as they are. Everything else is one of the classes below. A shared part
is one object in the tree, however often the pickle refers to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.core.chunk import is_contiguous


class PickleUnsafe(ValueError):
    """The bytes are not a pickle as picklers write it, or its reading would exceed the limits for its size.

    The message is the end of a sentence that begins with a subject, such as "The .metadata".
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
    """The result of calling a name: an instance, or any other value. `is_new`: the class's `__new__` was called.

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
    """The class and the name, if the node is a member of an enum: `getattr(class, name)`. None: it is not.

    Python 3.11.0 to 3.11.3 pickle members this way, other versions by value.
    Source: `Enum.__reduce_ex__` in CPython's Lib/enum.py.
    """
    is_call = node.called.path in _GETATTR and node.state is None and node.contents is None and not node.is_new
    if not is_call or len(node.arguments) != 2:
        return None
    kind, name = node.arguments
    return (kind, name) if type(kind) is Named and type(name) is str else None


_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""Protocol 2 uses the module's name of Python 2."""


_INT_MAX = (1 << 63) - 1
_DIMENSIONS_MAX = 64


@dataclass(frozen=True)
class StorageOutline:
    """A storage: its record is `data/<key>`; `kind` is the class name, from which the dtype follows."""

    key: str
    kind: str
    elements: int


@dataclass(frozen=True)
class TensorOutline:
    """A plain strided CPU tensor. `dtype`: its name in torch; None if the storage's class implies it."""

    storage: StorageOutline
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str | None

    def is_row_by_row(self) -> bool:
        """Whether the elements begin at the storage's start, and are contiguous in row-major order."""
        return self.offset == 0 and is_contiguous(self.shape, self.stride)


def storage_of(node: Any) -> StorageOutline:
    """The storage of a persistent id.

    Raises:
        PickleUnsafe: the id is not a storage.
    """
    identity = node.identity if type(node) is Stored else None
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise PickleUnsafe("has a persistent id that is not a storage")
    _, kind, key, _, elements = identity
    if type(kind) is not Named or type(key) is not str or type(elements) is not int or not 0 <= elements <= _INT_MAX:
        raise PickleUnsafe("has a persistent id that is not a storage")
    return StorageOutline(key, kind.name, elements)


def tensor_of(node: Any) -> TensorOutline | None:
    """The tensor that a call rebuilds. None: it is another call, or a tensor with state of its own."""
    # With a state or contents it is more than its elements: the slow path reads it as an object.
    if type(node) is not Made or node.is_new or node.state is not None or node.contents is not None:
        return None
    kind, arguments = (node.called.module, node.called.name), node.arguments
    if kind == ("torch._utils", "_rebuild_tensor_v2") and len(arguments) == 6:
        dtype = None
    elif kind == ("torch._utils", "_rebuild_tensor_v3") and len(arguments) == 7 and type(arguments[6]) is Named:
        dtype = arguments[6].name
    else:
        return None
    storage, offset, shape, stride = arguments[:4]
    if not all(type(numbers) is tuple and _are_sizes(numbers) for numbers in (shape, stride, (offset,))):
        return None
    if type(storage) is not Stored or len(shape) != len(stride) or len(shape) > _DIMENSIONS_MAX:
        return None
    return TensorOutline(storage_of(storage), offset, shape, stride, dtype)


def _are_sizes(numbers: tuple[Any, ...]) -> bool:
    # `type`, not isinstance: True is an int, and a size of True is a forgery.
    return all(type(number) is int and 0 <= number <= _INT_MAX for number in numbers)


# Bounds on a tree, checked before an unpickler reads its pickle.
#
# Unpicklers, picklers and loops visit a shared part each time that it is referenced, and hash keys completely. So a few
# hundred bytes can keep them busy for years. A deeply nested tuple overflows the C stack and ends the process.

DEPTH_MAX = 100
WEIGHT_MIN = 1 << 20
WEIGHT_PER_BYTE = 64
"""A tree may weigh `WEIGHT_MIN` plus this for each byte of its pickle. A node weighs 1 per visit, a text by length."""

_TEXT_BYTES = 64
_HOOKS = frozenset(
    f"__{name}__"
    for name in ("class", "getnewargs", "getnewargs_ex", "getstate", "module", "reduce", "reduce_ex", "setstate")
)
"""Attributes by which an instance controls picklers."""


def check_bounds(tree: Any, size_bytes: int) -> int:
    """Checks a tree, and returns its weight.

    A walk through the values of an accepted tree takes time in proportion to `size_bytes`, and at most DEPTH_MAX levels.

    Raises:
        PickleUnsafe: the tree exceeds a limit, a part contains itself, or an attribute would control a pickler.
    """
    weight_max = WEIGHT_MIN + WEIGHT_PER_BYTE * size_bytes
    extents: dict[int, tuple[int, int]] = {}
    begun: set[int] = set()
    # A loop, not a recursion: the depth is not known to be bounded yet.
    to_do = [tree]
    while to_do:
        node = to_do[-1]
        if id(node) in extents or type(node) in LEAVES:
            to_do.pop()
            continue
        if id(node) in begun:
            extents[id(node)] = _extent(node, extents, weight_max)
            to_do.pop()
            continue
        begun.add(id(node))
        for child in _children(node):
            if type(child) not in LEAVES and id(child) not in extents:
                # A cycle: a walk through the value would never end.
                if id(child) in begun:
                    raise PickleUnsafe("holds a part that contains itself")
                to_do.append(child)
    return extents[id(tree)][0] if id(tree) in extents else 1


def _extent(node: Any, extents: dict[int, tuple[int, int]], weight_max: int) -> tuple[int, int]:
    """Weight and depth of a node, from those of its children."""
    weight, depth = 1, 0
    for child in _children(node):
        if type(child) in LEAVES:
            weight += 1 + len(child) // _TEXT_BYTES if type(child) in (str, bytes) else 1
        else:
            below, deep = extents[id(child)]
            weight += below
            depth = max(depth, deep)
    # As in a billion-laughs file: each level refers to the one below many times.
    if weight > weight_max:
        raise PickleUnsafe("repeats its parts beyond the limit")
    if depth >= DEPTH_MAX:
        raise PickleUnsafe(f"is nested more than {DEPTH_MAX} levels deep")
    return weight, depth + 1


def _children(node: Any) -> Iterator[Any]:
    if type(node) is Made:
        yield from (node.called, node.arguments, node.state, node.contents)
    elif type(node) is Stored:
        yield node.identity
    else:
        items = [part for pair in node.items() for part in pair] if type(node) is Fields else node
        # With its own __reduce__ a safe class would run any callable when it is pickled again.
        if type(node) in (Fields, Pairs) and any(type(key) is str and key in _HOOKS for key in items[::2]):
            raise PickleUnsafe("sets an attribute that controls picklers")
        yield from items


def names_in(tree: Any) -> set[Named]:
    """Every name in a tree. A member of an enum counts as its class, in both forms of pickling."""
    found: set[Named] = set()
    seen: set[int] = set()
    to_do = [tree]
    while to_do:
        node = to_do.pop()
        if type(node) is Named:
            found.add(node)
        elif type(node) is Made and (member := member_in(node)) is not None:
            found.add(member[0])
        elif type(node) not in LEAVES and id(node) not in seen:
            seen.add(id(node))
            to_do += _children(node)
    return found
