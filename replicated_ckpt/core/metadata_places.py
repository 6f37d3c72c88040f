"""Where the items of a `.metadata` lie, read off its pickle's opcodes: nothing that it names is imported or called.

The agent needs the names of shards and the ranges of items, and neither unpickles nor imports torch. So the opcodes are
followed with texts, numbers and empty shells in place of what they would make. Every opcode adds a bounded number of
shells and nothing is hashed or walked through, so that time and memory go with the size of the pickle, whatever is in it.

Source: the opcodes of CPython's Lib/pickletools.py, protocols 2 to 5.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.sources import ByteRange
from replicated_ckpt.errors import MetadataUnsafe

_INT_BYTES_MAX = 9
_STOP, _BININT1, _BINGET, _LONG_BINGET, _MEMOIZE = ord("."), ord("K"), ord("h"), ord("j"), 0x94
_PROBLEMS = (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error, OverflowError)


class _Shell:
    """What a container or an instance would be: its class's name, its items in pairs or one by one, its state."""

    __slots__ = ("items", "name", "state")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.items: list[Any] = []
        self.state: Any = None


class _Named:
    """A name of a class, a function or a value."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Follower:
    """Follows one pickle to its end."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def result(self) -> Any:
        """What the pickle would give. The most frequent opcodes are followed here, as a call for each takes long."""
        raw, stack, memo, actions = self._raw, self._stack, self._memo, _ACTIONS
        position = 0
        while True:
            opcode = raw[position]
            position += 1
            if opcode == _MEMOIZE:
                memo.append(stack[-1])
            elif opcode == _BINGET:
                stack.append(memo[raw[position]])
                position += 1
            elif opcode == _LONG_BINGET:
                stack.append(memo[int.from_bytes(raw[position : position + 4], "little")])
                position += 4
            elif opcode == _BININT1:
                stack.append(raw[position])
                position += 1
            elif opcode == _STOP:
                return stack[-1]
            else:
                self._position = position
                actions[opcode](self)
                position = self._position

    def _taken(self, count: int) -> bytes:
        start = self._position
        self._position += count
        if self._position > len(self._raw):
            raise MetadataUnsafe("A length in .metadata goes beyond its end.")
        return self._raw[start : self._position]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._taken(width), "little")

    def skip(self, width: int) -> None:
        self._taken(width)

    def text(self, width: int) -> None:
        self._stack.append(self._taken(self._number(width)).decode("utf-8", "surrogatepass"))

    def data(self, width: int) -> None:
        self._taken(self._number(width))
        self._stack.append(None)

    def unsigned(self, width: int) -> None:
        self._stack.append(self._number(width))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._taken(4), "little", signed=True))

    def long(self) -> None:
        size = self._number(1)
        if size > _INT_BYTES_MAX:
            raise MetadataUnsafe(".metadata holds a number of more than 64 bits.")
        self._stack.append(int.from_bytes(self._taken(size), "little", signed=True))

    def float(self) -> None:
        self._taken(8)
        self._stack.append(None)

    def plain(self) -> None:
        self._stack.append(None)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def _above_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def container(self) -> None:
        self._stack.append(_Shell())

    def tuple_closed(self) -> None:
        self._above_mark()
        self._stack.append(None)  # no place is told by a tuple

    def tuple_of(self, count: int) -> None:
        self._stack[len(self._stack) - count :] = [None]

    def items_added(self) -> None:
        items = self._above_mark()
        self._stack[-1].items += items

    def item_added(self, count: int) -> None:
        items = self._stack[-count:]
        del self._stack[-count:]
        self._stack[-1].items += items

    def made(self) -> None:
        """NEWOBJ, REDUCE: arguments and what is called with them give one shell of its name."""
        self._stack.pop()
        self._stack.append(_Shell(self._stack.pop().name))

    def built(self) -> None:
        state = self._stack.pop()
        self._stack[-1].state = state

    def stack_global(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        self._stack.append(_Named(f"{module}.{name}"))

    def line_global(self) -> None:
        end = self._raw.index(b"\n", self._raw.index(b"\n", self._position) + 1)
        module, _, name = self._taken(end - self._position).decode().partition("\n")
        self._position += 1
        self._stack.append(_Named(f"{module}.{name}"))

    def put(self, width: int) -> None:
        if self._number(width) != len(self._memo):
            raise MetadataUnsafe(".metadata stores into its memo out of order.")
        self._memo.append(self._stack[-1])


def _with(method: Callable[[_Follower, int], None], number: int) -> Callable[[_Follower], None]:
    return lambda follower: method(follower, number)


_ACTIONS: Mapping[int, Callable[[_Follower], None]] = {
    0x80: _with(_Follower.skip, 1),  # PROTO
    0x95: _with(_Follower.skip, 8),  # FRAME: what it frames is followed like the rest
    0x8C: _with(_Follower.text, 1),
    ord("X"): _with(_Follower.text, 4),
    0x8D: _with(_Follower.text, 8),
    ord("C"): _with(_Follower.data, 1),
    ord("B"): _with(_Follower.data, 4),
    0x8E: _with(_Follower.data, 8),
    ord("M"): _with(_Follower.unsigned, 2),
    ord("J"): _Follower.signed,
    0x8A: _Follower.long,
    ord("G"): _Follower.float,
    ord("N"): _Follower.plain,
    0x88: _Follower.plain,
    0x89: _Follower.plain,
    ord("("): _Follower.mark,
    ord("]"): _Follower.container,
    ord("}"): _Follower.container,
    ord(")"): _Follower.plain,
    0x8F: _Follower.container,
    ord("t"): _Follower.tuple_closed,
    0x91: _Follower.tuple_closed,  # FROZENSET
    0x85: _with(_Follower.tuple_of, 1),
    0x86: _with(_Follower.tuple_of, 2),
    0x87: _with(_Follower.tuple_of, 3),
    ord("e"): _Follower.items_added,
    ord("u"): _Follower.items_added,
    0x90: _Follower.items_added,
    ord("a"): _with(_Follower.item_added, 1),
    ord("s"): _with(_Follower.item_added, 2),
    0x81: _Follower.made,
    ord("R"): _Follower.made,
    ord("b"): _Follower.built,
    0x93: _Follower.stack_global,
    ord("c"): _Follower.line_global,
    ord("q"): _with(_Follower.put, 1),
    ord("r"): _with(_Follower.put, 4),
}


def item_ranges(raw: bytes) -> Mapping[str, tuple[ByteRange, ...]]:
    """Where each shard that a `.metadata` needs must have its items, ordered by their place in it.

    Raises:
        MetadataUnsafe: it is no metadata as DCP writes it, or names a file that is no shard.
    """
    try:
        top = _Follower(raw).result()
        if not top.name.endswith(".Metadata"):
            raise MetadataUnsafe(f".metadata holds a {top.name[:200]}, no DCP metadata.")
        places = _field(top.state, "storage_data")
        return _ranges(places.items[1::2])
    except _PROBLEMS as exc:
        raise MetadataUnsafe(f".metadata could not be followed: {type(exc).__name__}: {exc}.") from exc


def needed_bytes(ranges: Mapping[str, tuple[ByteRange, ...]]) -> Mapping[str, int]:
    """How long each shard must be at least."""
    return {shard: max(item.end for item in items) for shard, items in ranges.items()}


def _field(state: _Shell, wanted: str) -> Any:
    for key, value in zip(state.items[-2::-2], state.items[::-2], strict=True):
        if isinstance(key, str) and key == wanted:
            return value
    raise KeyError(wanted)


def _ranges(infos: list[_Shell]) -> Mapping[str, tuple[ByteRange, ...]]:
    found: dict[str, list[ByteRange]] = {}
    seen: set[int] = set()
    for info in infos:
        if id(info) in seen:  # shared parts are looked through once, however often they are named
            continue
        seen.add(id(info))
        shard, offset, length = (_field(info.state, name) for name in ("relative_path", "offset", "length"))
        if not isinstance(shard, str) or ShardName.parse(shard) is None:
            raise MetadataUnsafe(f".metadata has an item in {str(shard)[:200]!r}, which is no shard.")
        if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
            raise MetadataUnsafe(f".metadata has an item at no place of {shard}.")
        found.setdefault(shard, []).append(ByteRange(offset, length))
    return {shard: tuple(sorted(items, key=lambda item: item.offset)) for shard, items in sorted(found.items())}
