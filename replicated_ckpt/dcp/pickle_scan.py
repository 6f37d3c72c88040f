"""A look at a pickle before it is unpickled: what it would call and build, found by following its opcodes, not by doing it.

The C unpickler behind an allow-list still lets a hostile pickle change a class that it may name (BUILD on the class),
ask for gigabytes (a memo index of 2**31), hash or print for years (lists of shared lists, a million names of one long
number), or end the process (a tuple in a tuple, a million deep). So each opcode is followed here first, on a shadow
stack that knows of every item what it is, how much there is in it and how deep, and never makes it.

Source: the opcodes of CPython's Lib/pickletools.py, protocols 2 to 5; the rules are this project's.
"""

import struct
from collections.abc import Callable
from typing import Any

from replicated_ckpt.dcp.pickle_items import (
    AnyItem,
    Item,
    Kind,
    Making,
    Named,
    Text,
    Tuples,
    called_with,
    is_state,
    number,
    weight_of_bytes,
)
from replicated_ckpt.dcp.pickle_runs import InstanceRuns
from replicated_ckpt.errors import MetadataUnsafe

_KEY_WEIGHT_MAX = 10_000
_HASHED_PER_BYTE_MAX = 16
_WEIGHT_PER_BYTE_MAX = 64
_WEIGHT_MIN = 1 << 20
_INT_BYTES_MAX = 9
_NUMBER = number()
_Resolve = Callable[[str, str], Named]


class _Scan:
    """Follows one pickle. Wherever C's unpickler would refuse an opcode, it need not be refused here."""

    def __init__(self, raw: bytes, resolve: _Resolve) -> None:
        self._raw = raw
        self._resolve = resolve
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._tuples = Tuples()
        self._runs = InstanceRuns(raw, self._memo, self._tuples)
        self._hashed = 0

    def run(self) -> None:
        raw, stack, memo = self._raw, self._stack, self._memo
        position = 0
        while True:
            opcode = raw[position]
            position += 1
            kind = _KIND[opcode]
            if kind == _MEMOIZE:
                memo.append(stack[-1])
            elif kind == _CALL:
                _ACTIONS[opcode](self)
            elif kind == _FETCH:
                end = position + _WIDTH[opcode]
                item = memo[int.from_bytes(raw[position:end], "little")]
                item.is_shared = True
                if raw[end] == _EMPTY_TUPLE_OPCODE and (run := self._runs.followed(item, end)) is not None:
                    item, end, hashed = run
                    self._count_hashed(hashed)
                stack.append(item)
                position = end
            elif kind == _FIXED:
                position += _WIDTH[opcode]
                stack.append(_NUMBER)
            elif kind == _SIZED:
                start = position + _WIDTH[opcode]
                position = start + int.from_bytes(raw[position:start], "little")
                stack.append(self._sized(opcode, start, position))
            elif kind == _STOP:
                return self._check_whole()
            else:
                position = self._rare(opcode, position)

    def _sized(self, opcode: int, start: int, end: int) -> AnyItem:
        if end > len(self._raw):
            raise MetadataUnsafe("A length in .metadata goes beyond its end.")
        if opcode in _TEXTS:
            return Text(start, end)
        if opcode == _LONG1:
            if end - start > _INT_BYTES_MAX:  # the hash of a large number takes long, and many such hash alike
                raise MetadataUnsafe(".metadata holds a number of more than 64 bits.")
            return _NUMBER
        return Item(Kind.SCALAR, weight_of_bytes(end - start))

    def _rare(self, opcode: int, position: int) -> int:
        raw = self._raw
        if opcode == 0x80:  # PROTO
            return position + 1
        if opcode == 0x95:  # FRAME
            (length,) = struct.unpack_from("<Q", raw, position)
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

    def _check_whole(self) -> None:
        if self._stack[-1].weight > _WEIGHT_MIN + _WEIGHT_PER_BYTE_MAX * len(self._raw):
            raise MetadataUnsafe(".metadata repeats itself beyond measure.")

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, Text) or not isinstance(module, Text):
            raise MetadataUnsafe(".metadata makes a name of something that is no text.")
        texts = [self._raw[text.start : text.end].decode() for text in (module, name)]
        self._stack.append(self._resolve(*texts))

    def new_object(self) -> None:
        arguments, cls = self._stack.pop(), self._stack.pop()
        if cls.kind != Kind.NAMED or not called_with(arguments, cls.making) or cls.making not in _HAVE_INSTANCES:
            raise MetadataUnsafe(".metadata makes an instance in a way that DCP metadata has no need of.")
        self._stack.append(Item(Kind.INSTANCE, 1 + arguments.weight, 1 + arguments.depth, cls.making))

    def reduce(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        making = called.making
        if called.kind != Kind.NAMED or not called_with(arguments, making) or making is Making.STATE:
            raise MetadataUnsafe(".metadata calls something in a way that DCP metadata has no need of.")
        if making is Making.MAPPING:
            self._stack.append(Item(Kind.DICT))
        elif making is Making.ANY:
            self._stack.append(Item(Kind.INSTANCE, 1 + arguments.weight, 1 + arguments.depth, making))
        else:
            self._count_hashed(arguments.weight if making is Making.ITEMS else 0)
            self._stack.append(self._tuples.made_with(arguments))

    def build(self) -> None:
        state, instance = self._stack.pop(), self._stack[-1]
        if instance.kind != Kind.INSTANCE or instance.is_shared or instance.is_built:
            raise MetadataUnsafe(".metadata gives a state to something that is no new instance.")
        if instance.making is not Making.ANY and not is_state(state):
            raise MetadataUnsafe(".metadata gives an instance something that is no state.")
        instance.add((state,))
        instance.is_built = True

    def tuple_of_1(self) -> None:
        self._stack.append(self._tuples.of((self._stack.pop(),)))

    def tuple_of_2(self) -> None:
        self._stack.append(self._tuples.of((self._stack.pop(), self._stack.pop())))

    def tuple_of_3(self) -> None:
        self._stack.append(self._tuples.of((self._stack.pop(), self._stack.pop(), self._stack.pop())))

    def tuple_closed(self) -> None:
        self._stack.append(self._tuples.of(self._above_mark()))

    def frozenset_closed(self) -> None:
        items = self._tuples.of(self._above_mark())
        self._count_hashed(items.weight)
        self._stack.append(self._tuples.made_with(items))

    def items_set(self) -> None:
        self._set(self._above_mark())

    def item_set(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set(self, items: list[AnyItem]) -> None:
        for key in items[::2]:
            self._hash(key)
        self._new(Kind.DICT).add(items)

    def elements_added(self) -> None:
        items = self._above_mark()
        for item in items:
            self._hash(item)
        self._new(Kind.SET).add(items)

    def items_appended(self) -> None:
        items = self._above_mark()
        self._new(Kind.LIST).add(items)

    def item_appended(self) -> None:
        item = self._stack.pop()
        self._new(Kind.LIST).add((item,))

    def _new(self, kind: Kind) -> Item:
        """The container that is being filled. It is whole before it is used: what is in an item is known for good."""
        target: Item = self._stack[-1]
        if (target.kind != kind and target.making is not Making.ANY) or target.is_shared:
            raise MetadataUnsafe(".metadata puts items into something that is no new container for them.")
        return target

    def new_list(self) -> None:
        self._stack.append(Item(Kind.LIST))

    def new_dict(self) -> None:
        self._stack.append(Item(Kind.DICT))

    def new_set(self) -> None:
        self._stack.append(Item(Kind.SET))

    def empty_tuple(self) -> None:
        self._stack.append(_EMPTY_TUPLE)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def plain(self) -> None:
        self._stack.append(_NUMBER)

    def _above_mark(self) -> list[AnyItem]:
        start = self._marks.pop()
        items, self._stack[start:] = self._stack[start:], []
        return items

    def _hash(self, key: AnyItem) -> None:
        if key.weight > _KEY_WEIGHT_MAX:
            raise MetadataUnsafe(".metadata has a key that would take too long to hash.")
        self._count_hashed(key.weight)

    def _count_hashed(self, weight: int) -> None:
        self._hashed += weight
        if self._hashed > _WEIGHT_MIN + _HASHED_PER_BYTE_MAX * len(self._raw):
            raise MetadataUnsafe(".metadata has keys that would take too long to hash.")


_REFUSED, _MEMOIZE, _CALL, _FETCH, _FIXED, _SIZED, _STOP, _RARE = range(8)
_HAVE_INSTANCES = (Making.STATE, Making.ANY)
_TEXTS = (0x8C, ord("X"), 0x8D)
_LONG1 = 0x8A
_EMPTY_TUPLE_OPCODE = ord(")")
_EMPTY_TUPLE = Tuples().of(())
_ACTIONS: dict[int, Callable[[_Scan], None]] = {
    ord("("): _Scan.mark,
    0x93: _Scan.stack_global,
    0x81: _Scan.new_object,
    ord("R"): _Scan.reduce,
    ord("b"): _Scan.build,
    ord("t"): _Scan.tuple_closed,
    0x91: _Scan.frozenset_closed,
    0x85: _Scan.tuple_of_1,
    0x86: _Scan.tuple_of_2,
    0x87: _Scan.tuple_of_3,
    _EMPTY_TUPLE_OPCODE: _Scan.empty_tuple,
    ord("]"): _Scan.new_list,
    ord("}"): _Scan.new_dict,
    0x8F: _Scan.new_set,
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
    _SIZED: {0x8C: 1, ord("X"): 4, 0x8D: 8, ord("C"): 1, ord("B"): 4, 0x8E: 8, _LONG1: 1},
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

    Holds afterwards: unpickling it uses only what `resolve` let pass, each in the way that it said, gives a state only to
    instances that it has just made, and needs memory and stack in proportion to its size; keys that were chosen to hash
    alike still take time with the square of their number. What it makes can be walked through in time with its size.

    Raises:
        MetadataUnsafe: it would do anything else, or breaks off.
    """
    try:
        _Scan(raw, resolve).run()
    except (IndexError, ValueError, struct.error) as exc:
        raise MetadataUnsafe(f".metadata is no pickle that could be followed: {type(exc).__name__}: {exc}.") from exc
