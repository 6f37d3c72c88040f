"""A look at a pickle before it is unpickled: what it would call and build, found by following its opcodes, not by doing it.

The C unpickler behind an allow-list still lets a hostile pickle change a class that it may name (BUILD on the class),
ask for gigabytes (a memo index of 2**31), or hash for years (tuples of shared tuples as keys). So each opcode is followed
here first, on a shadow stack that knows of every item what it is and how much there is to hash, and never makes it.

Source: the opcodes of CPython's Lib/pickletools.py, protocols 2 to 5; the rules are this project's.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.errors import MetadataUnsafe

_KEY_WEIGHT_MAX = 10_000
_WEIGHT_PER_BYTE_MAX = 64
_WEIGHT_MIN = 1 << 20

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class Named:
    """Something that the pickle names: a class or a function. `may_build`: its instances may be given any state."""

    module: str
    name: str
    may_build: bool


class _Cell:
    """A container or an instance: how much there is to hash in it, and whether BUILD may still give it a state."""

    __slots__ = ("is_open", "was_fetched", "weight")

    def __init__(self, weight: int, *, is_open: bool = False) -> None:
        self.weight = weight
        self.is_open = is_open
        self.was_fetched = False


_DATA = _Cell(1)
_MARK = object()
_Resolve = Callable[[str, str], Named]


class _Scan:
    """Follows one pickle. An item of the shadow stack is a cell, a named thing, or the place of a text in the bytes."""

    def __init__(self, raw: bytes, resolve: _Resolve) -> None:
        self._raw = raw
        self._resolve = resolve
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._hashed = 0

    def run(self) -> None:
        """Raises: MetadataUnsafe, IndexError, struct.error, ValueError: the pickle is refused, or broken."""
        raw, stack, size = self._raw, self._stack, len(self._raw)
        position = 0
        while True:
            opcode = raw[position]
            position += 1
            kind = _KIND[opcode]
            if kind == _TEXT:
                width = _WIDTH[opcode]
                start = position + width
                position = start + int.from_bytes(raw[position:start], "little")
                stack.append((start, position))
            elif kind == _MEMOIZE:
                self._memo.append(stack[-1])
            elif kind == _FETCH:
                width = _WIDTH[opcode]
                self._fetch(int.from_bytes(raw[position : position + width], "little"))
                position += width
            elif kind == _CALL:
                _ACTIONS[opcode](self)
            elif kind == _FIXED:
                position += _WIDTH[opcode]
                stack.append(_DATA)
            elif kind == _SIZED:
                start = position + _WIDTH[opcode]
                position = start + int.from_bytes(raw[position:start], "little")
                stack.append(_DATA)
            elif kind == _STOP:
                return
            else:
                position = self._rare(opcode, position)
            if position > size:
                raise MetadataUnsafe("A length in .metadata goes beyond its end.")

    def _rare(self, opcode: int, position: int) -> int:
        raw = self._raw
        if opcode == 0x80:  # PROTO
            return position + 1
        if opcode == 0x95:  # FRAME
            (length,) = _U64.unpack_from(raw, position)
            if position + 8 + length > len(raw):
                raise MetadataUnsafe("A frame of .metadata goes beyond its end.")
            return position + 8
        if opcode in (ord("q"), ord("r")):  # BINPUT, LONG_BINPUT: picklers count up
            width = 1 if opcode == ord("q") else 4
            if int.from_bytes(raw[position : position + width], "little") != len(self._memo):
                raise MetadataUnsafe(".metadata stores into its memo out of order.")
            self._memo.append(self._stack[-1])
            return position + width
        if opcode == ord("c"):  # GLOBAL: two lines of text
            end = raw.index(b"\n", raw.index(b"\n", position) + 1)
            module, _, name = raw[position:end].decode().partition("\n")
            self._stack.append(self._resolve(module, name))
            return end + 1
        raise MetadataUnsafe(f".metadata uses the pickle opcode {opcode:#04x}, which DCP metadata has no need of.")

    def _fetch(self, index: int) -> None:
        item = self._memo[index]
        if isinstance(item, _Cell):
            item.was_fetched = True
        self._stack.append(item)

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, tuple) or not isinstance(module, tuple):
            raise MetadataUnsafe(".metadata makes a name of something that is no text.")
        self._stack.append(self._resolve(self._text(module), self._text(name)))

    def _text(self, place: tuple[int, int]) -> str:
        return self._raw[place[0] : place[1]].decode("utf-8", "surrogatepass")

    def new_object(self) -> None:
        arguments, cls = self._stack.pop(), self._stack.pop()
        if not isinstance(cls, Named) or not isinstance(arguments, _Cell):
            raise MetadataUnsafe(".metadata makes an instance of something that is no class.")
        self._stack.append(_Cell(1 + arguments.weight, is_open=True))

    def reduce(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Named) or not isinstance(arguments, _Cell):
            raise MetadataUnsafe(".metadata calls something that it did not name.")
        self._count_hashed(arguments.weight)  # a set, say, hashes what it is called with
        self._stack.append(_Cell(1 + arguments.weight, is_open=called.may_build))

    def build(self) -> None:
        state, instance = self._stack.pop(), self._stack[-1]
        if not isinstance(instance, _Cell) or not instance.is_open or instance.was_fetched:
            raise MetadataUnsafe(".metadata gives a state to something that is no new instance.")
        instance.weight += _weight(state)
        instance.is_open = False

    def tuple_of(self, count: int) -> None:
        items = self._stack[len(self._stack) - count :]
        if len(items) != count or _MARK in items:
            raise MetadataUnsafe(".metadata takes items that are not there.")
        del self._stack[len(self._stack) - count :]
        self._stack.append(_Cell(1 + sum(map(_weight, items))))

    def tuple_closed(self) -> None:
        self._stack.append(_Cell(1 + sum(map(_weight, self._above_mark()))))

    def frozenset_closed(self) -> None:
        self.tuple_closed()
        self._count_hashed(self._stack[-1].weight)

    def items_set(self) -> None:
        items = self._above_mark()
        self._add_items(items)

    def item_set(self) -> None:
        items = [self._stack.pop(), self._stack.pop()]
        self._add_items(items[::-1])

    def _add_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            self._hash(key)
        self._target().weight += sum(map(_weight, items))

    def elements_added(self) -> None:
        items = self._above_mark()
        for item in items:
            self._hash(item)
        self._target().weight += sum(map(_weight, items))

    def items_appended(self) -> None:
        items = self._above_mark()
        self._target().weight += sum(map(_weight, items))

    def item_appended(self) -> None:
        item = self._stack.pop()
        self._target().weight += _weight(item)

    def container(self) -> None:
        self._stack.append(_Cell(1))

    def mark(self) -> None:
        self._stack.append(_MARK)

    def plain(self) -> None:
        self._stack.append(_DATA)

    def _target(self) -> _Cell:
        target = self._stack[-1]
        if not isinstance(target, _Cell) or target is _DATA:
            raise MetadataUnsafe(".metadata puts items into something that is no container.")
        return target

    def _above_mark(self) -> list[Any]:
        stack = self._stack
        position = len(stack) - 1
        while stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise MetadataUnsafe(".metadata refers to a mark that it did not set.")
        items = stack[position + 1 :]
        del stack[position:]
        return items

    def _hash(self, key: Any) -> None:
        weight = _weight(key)
        self._count_hashed(weight)
        if weight > _KEY_WEIGHT_MAX:
            raise MetadataUnsafe(".metadata has a key that would take too long to hash.")

    def _count_hashed(self, weight: int) -> None:
        self._hashed += weight
        if self._hashed > _WEIGHT_MIN + _WEIGHT_PER_BYTE_MAX * len(self._raw):
            raise MetadataUnsafe(".metadata has keys that would take too long to hash.")


def _weight(item: Any) -> int:
    return item.weight if isinstance(item, _Cell) else 1


_REFUSED, _TEXT, _MEMOIZE, _FETCH, _CALL, _FIXED, _SIZED, _STOP, _RARE = range(9)
_ACTIONS: dict[int, Callable[[_Scan], None]] = {
    ord("("): _Scan.mark,
    0x93: _Scan.stack_global,
    0x81: _Scan.new_object,
    ord("R"): _Scan.reduce,
    ord("b"): _Scan.build,
    ord("t"): _Scan.tuple_closed,
    0x91: _Scan.frozenset_closed,
    0x85: lambda scan: scan.tuple_of(1),
    0x86: lambda scan: scan.tuple_of(2),
    0x87: lambda scan: scan.tuple_of(3),
    ord("]"): _Scan.container,
    ord("}"): _Scan.container,
    0x8F: _Scan.container,
    ord(")"): _Scan.container,
    ord("e"): _Scan.items_appended,
    ord("a"): _Scan.item_appended,
    ord("u"): _Scan.items_set,
    ord("s"): _Scan.item_set,
    0x90: _Scan.elements_added,
    ord("N"): _Scan.plain,
    0x88: _Scan.plain,
    0x89: _Scan.plain,
}
_BY_KIND = {
    _TEXT: {0x8C: 1, ord("X"): 4, 0x8D: 8},
    _SIZED: {ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x8A: 1, 0x8B: 4},
    _FIXED: {ord("J"): 4, ord("K"): 1, ord("M"): 2, ord("G"): 8},
    _FETCH: {ord("h"): 1, ord("j"): 4},
    _MEMOIZE: {0x94: 0},
    _STOP: {ord("."): 0},
    _RARE: dict.fromkeys((0x80, 0x95, ord("q"), ord("r"), ord("c")), 0),
    _CALL: dict.fromkeys(_ACTIONS, 0),
}
_KIND = [_REFUSED] * 256
_WIDTH = [0] * 256
for _kind, _widths in _BY_KIND.items():
    for _opcode, _width in _widths.items():
        _KIND[_opcode], _WIDTH[_opcode] = _kind, _width


def scan(raw: bytes, resolve: _Resolve) -> None:
    """Follows the pickle in `raw` without making anything of it. `resolve` refuses the names that may not be used.

    Holds afterwards: unpickling it names only what `resolve` let pass, gives a state only to instances that it has just
    made, needs memory and time in proportion to its size, and the result is what an ordinary pickler wrote.

    Raises:
        MetadataUnsafe: it would do anything else, or breaks off.
    """
    try:
        _Scan(raw, resolve).run()
    except (IndexError, ValueError, struct.error) as exc:
        raise MetadataUnsafe(f".metadata is no pickle that could be followed: {type(exc).__name__}: {exc}.") from exc
