"""The content of a pickle as a tree of values. Its names are not imported, its calls are not made, its keys not hashed.

Texts, bytes, numbers, None, lists and tuples stay as they are. Everything else is one of the classes below. A shared part
is one object in the tree, however often the pickle refers to it.
"""

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
    """A plain strided CPU tensor. `dtype`: torch's name, if the storage has none."""

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
