"""What the scan of a pickle knows of the items that the pickle would make: kind, weight and depth, never the value."""

from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum, auto

from replicated_ckpt.errors import MetadataUnsafe

DEPTH_MAX = 200
_CALL_WEIGHT_MAX = 10_000
_WEIGHT_CAP = 1 << 30
_WEIGHT_OF_NO_DATA = 1 << 62
"""Weight of what may not be a value: the sum of any items with one of these among them is larger than of any others."""


class Kind(IntEnum):
    """What an item is, as far as the rules tell items apart."""

    SCALAR = auto()
    TEXT = auto()
    TUPLE = auto()
    LIST = auto()
    DICT = auto()
    SET = auto()
    INSTANCE = auto()
    NAMED = auto()


class Making(Enum):
    """How a pickle may use something that it names."""

    VALUE = auto()
    """As it is: a dtype."""
    STATE = auto()
    """A class whose instances are made without arguments and given one state, as picklers do with dataclasses."""
    PLAIN = auto()
    """Called with texts and numbers."""
    SIZE = auto()
    """Called with one tuple of numbers."""
    ITEMS = auto()
    """Called with one list, all of it hashed."""
    MAPPING = auto()
    """Called without arguments, then given items."""
    ANY = auto()
    """What a user registered: in every way that picklers use."""


class Item:
    """A number, a container or an instance.

    `weight` counts everything that is met on a walk through it, shared parts as often as they are met. `count` is the
    number of items of a tuple, 3 for more. `is_plain`: it consists of tuples, texts and numbers only. Once it
    `is_shared` nothing more may be put into it.
    """

    __slots__ = ("count", "depth", "is_built", "is_plain", "is_shared", "kind", "making", "weight")

    def __init__(self, kind: Kind, weight: int = 1, depth: int = 1, making: Making = Making.VALUE) -> None:
        self.kind = kind
        self.weight = weight
        self.depth = depth
        self.making = making
        self.count = 0
        self.is_plain = False
        self.is_shared = False
        self.is_built = False

    def add(self, items: "Iterable[AnyItem]") -> None:
        """Puts items into a container or an instance that is being made.

        Raises:
            MetadataUnsafe: it would be nested too deep, or hold what is no value.
        """
        weight, depth = self.weight, self.depth
        for item in items:
            weight += item.weight
            if item.depth >= depth:
                depth = item.depth + 1
        self.weight, self.depth = _bounded(weight), _nested(depth)


class Text:
    """A text, known by its place in the pickle."""

    __slots__ = ("end", "is_shared", "start", "weight")

    kind = Kind.TEXT
    depth = 0
    making = Making.VALUE
    is_plain = True

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.weight = weight_of_bytes(end - start)
        self.is_shared = False


class Named:
    """Something that the pickle names: a class, a function, a dtype."""

    __slots__ = ("is_shared", "making", "module", "name", "weight")

    kind = Kind.NAMED
    depth = 0
    is_plain = False

    def __init__(self, module: str, name: str, making: Making) -> None:
        self.module = module
        self.name = name
        self.making = making
        self.weight = 1 if making in (Making.VALUE, Making.ANY) else _WEIGHT_OF_NO_DATA
        self.is_shared = False


def weight_of_bytes(size: int) -> int:
    return 1 + (size >> 6)


AnyItem = Item | Text | Named


def number() -> Item:
    """A number, or anything else that nothing can be put into."""
    item = Item(Kind.SCALAR, depth=0)
    item.is_plain = True
    return item


def called_with(arguments: AnyItem, making: Making) -> bool:
    """Whether something that is used in this way may be called so."""
    if not isinstance(arguments, Item) or arguments.kind != Kind.TUPLE:
        return False
    if making is Making.PLAIN:
        return arguments.is_plain and arguments.depth == 1 and arguments.weight <= _CALL_WEIGHT_MAX
    if making is Making.SIZE:
        is_one_tuple = arguments.is_plain and arguments.count == 1 and arguments.depth == 2
        return is_one_tuple and arguments.weight <= _CALL_WEIGHT_MAX
    if making is Making.ITEMS:
        return arguments.count == 1
    if making in (Making.STATE, Making.MAPPING):
        return arguments.count == 0
    return making is Making.ANY


def is_state(state: AnyItem) -> bool:
    """Whether it may be the state of an instance: a dictionary, or the short tuple of a `__setstate__`, never a pair.

    The second of a pair would be set attribute by attribute, also such as `__class__`.
    """
    if not isinstance(state, Item):
        return False
    return state.kind == Kind.DICT or (
        state.kind == Kind.TUPLE and state.count == 3 and state.weight <= _CALL_WEIGHT_MAX
    )


class Tuples:
    """Tuples, and what is made of them by a call. As they never change, one stands for all that are alike."""

    def __init__(self) -> None:
        self._tuples: dict[tuple[int, int, bool, int], Item] = {}
        self._made: dict[tuple[int, int], Item] = {}

    def of(self, items: Sequence[AnyItem]) -> Item:
        """The tuple of these items.

        Raises:
            MetadataUnsafe: it would be nested too deep, or hold what is no value.
        """
        weight, depth, is_plain = 1, 0, True
        for item in items:
            weight += item.weight
            if item.depth > depth:  # noqa: PLR1730 - a call of max for each item takes long
                depth = item.depth
            if not item.is_plain:
                is_plain = False
        key = (weight, depth, is_plain, len(items))
        found = self._tuples.get(key)
        if found is None:
            found = self._tuples[key] = Item(Kind.TUPLE, _bounded(weight), _nested(depth + 1))
            found.is_plain = is_plain
            found.count = min(len(items), 3)
        return found

    def made_with(self, arguments: AnyItem) -> Item:
        """What a call with these arguments gives."""
        key = (arguments.weight, arguments.depth)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Item(Kind.SCALAR, *key)
        return found


def _bounded(weight: int) -> int:
    if weight >= _WEIGHT_OF_NO_DATA:
        raise MetadataUnsafe(".metadata holds a class or a function as a value.")
    return min(weight, _WEIGHT_CAP)


def _nested(depth: int) -> int:
    if depth > DEPTH_MAX:
        raise MetadataUnsafe(f".metadata is nested more than {DEPTH_MAX} deep.")
    return depth
