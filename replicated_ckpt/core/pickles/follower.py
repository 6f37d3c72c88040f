"""The follower of pickle opcodes: the only reader of untrusted pickles.

It accepts the output of picklers in protocols 2 to 5, and only pickles that every unpickler reads alike: an opcode and its
argument lie in one frame, the memo is filled in order, a container is complete before its second use, and one value is
left at the end. Time and memory are in proportion to the size of the pickle.

Source: the opcodes of CPython's Lib/pickletools.py; `_Unframer` in its Lib/pickle.py.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from replicated_ckpt.core.pickles.instances import Instances
from replicated_ckpt.core.pickles.tree import LEAVES, Elements, FrozenElements, Made, Named, Pairs, PickleUnsafe, Stored

_PROTOCOL_MAX = 5
_MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _STOP = 0x94, ord("h"), ord("j"), ord("K"), ord(".")
_BEYOND = "has an argument that extends beyond its end or its frame"


def follow(raw: bytes) -> Any:
    """The tree of the pickle at the start of `raw`.

    Raises:
        PickleUnsafe: there is no pickle, or one that no pickler writes.
    """
    try:
        return _Follower(raw).follow()
    except PickleUnsafe:
        raise
    except (IndexError, ValueError) as exc:
        raise PickleUnsafe(f"is not a complete pickle: {type(exc).__name__}: {exc}") from exc


class Stack:
    """The stack of a pickle's opcodes, with nodes of the tree in place of objects.

    `items` are those above the last mark. `shared`: ids of nodes that were used a second time, and must not change.
    """

    def __init__(self, shared: set[int]) -> None:
        self.items: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._shared = shared

    def only_item(self) -> Any:
        """The single item at the end. Raises PickleUnsafe: there are none or several."""
        if self._below_marks or len(self.items) != 1:
            raise PickleUnsafe("does not end with one value")
        return self.items[0]

    def mark(self) -> None:
        self._below_marks.append(self.items)
        self.items = []

    def _above_mark(self) -> list[Any]:
        above, self.items = self.items, self._below_marks.pop()
        return above

    def close_tuple(self) -> None:
        above = self._above_mark()
        self.items.append(tuple(above))

    def close_frozenset(self) -> None:
        above = self._above_mark()
        self.items.append(FrozenElements(above))

    def tuple_of_1(self) -> None:
        self.items[-1] = (self.items[-1],)

    def tuple_of_2(self) -> None:
        self.items[-2:] = [(self.items[-2], self.items[-1])]

    def tuple_of_3(self) -> None:
        self.items[-3:] = [(self.items[-3], self.items[-2], self.items[-1])]

    # Containers: complete before their second use --------------------------------------------------------------------

    def append(self) -> None:
        item = self.items.pop()
        self._append([item])

    def append_all(self) -> None:
        self._append(self._above_mark())

    def set_item(self) -> None:
        value, key = self.items.pop(), self.items.pop()
        self._set([key, value])

    def set_all(self) -> None:
        self._set(self._above_mark())

    def add_all(self) -> None:
        above = self._above_mark()
        target = self._new()
        if type(target) is not Elements:
            raise PickleUnsafe("adds elements to something that is not a set")
        target += above

    def _append(self, above: list[Any]) -> None:
        target = self._fill(list)
        if type(target) is not list:
            raise PickleUnsafe("appends to something that is not a list")
        target += above

    def _set(self, above: list[Any]) -> None:
        target = self._fill(Pairs)
        if type(target) is not Pairs or len(above) % 2:
            raise PickleUnsafe("sets items of something that is not a dictionary, or sets a key without a value")
        target += above

    def _fill(self, kind: type[list[Any]]) -> Any:
        """The container on top of the stack; for an instance, that of its contents, created as `kind` if missing."""
        target = self._new()
        if type(target) is not Made or target.state is not None:
            return target
        if target.contents is None:
            target.contents = kind()
        return target.contents

    def _new(self) -> Any:
        """The node on top of the stack. Raises PickleUnsafe: another node refers to it already."""
        # A change after the second use could build a cycle, or values that two unpicklers read differently.
        if id(self.items[-1]) in self._shared:
            raise PickleUnsafe("changes an object after its use")
        return self.items[-1]

    # Names and calls -------------------------------------------------------------------------------------------------

    def name(self) -> None:
        name, module = self.items.pop(), self.items.pop()
        if type(module) is not str or type(name) is not str or not module or not name:
            raise PickleUnsafe("uses something that is not text as a name")
        self.items.append(Named(module, name))

    def new_instance(self) -> None:
        self._make(is_new=True)

    def call(self) -> None:
        self._make(is_new=False)

    def _make(self, *, is_new: bool) -> None:
        arguments, called = self.items.pop(), self.items.pop()
        # A call of a call's result could reach any function through an allowed one.
        if type(called) is not Named or type(arguments) is not tuple:
            raise PickleUnsafe("calls something that it did not name, or passes no tuple of arguments")
        self.items.append(Made(called, arguments, is_new=is_new))

    def build(self) -> None:
        state = self.items.pop()
        made = self._new()
        # A second state would be merged by some classes and replace the first in others.
        if type(made) is not Made or made.state is not None or state is None:
            raise PickleUnsafe("sets the state of something that is not a new instance")
        made.state = state

    def store(self) -> None:
        self.items.append(Stored(self.items.pop()))


class _Follower:
    """Follows one pickle to its end. `_limit` is the end of the frame, or of all bytes outside a frame."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._limit = len(raw)
        self._is_framed = False
        self._shared: set[int] = set()  # ids of items read from the memo, which keeps them alive, so no id is reused
        self._stack = Stack(self._shared)
        self._memo: list[Any] = []
        self._instances = Instances(raw, self._memo, self._shared)

    def follow(self) -> Any:
        """Follows all opcodes. The most frequent ones are inlined, since a call for each would dominate the time."""
        raw, memo, shared = self._raw, self._memo, self._shared
        items, position = self._stack.items, 0
        while True:
            if position >= self._limit:
                self._leave_frame(position)
            opcode = raw[position]
            if opcode == _MEMOIZE:
                memo.append(items[-1])
                position += 1
            elif opcode in (_BINGET, _LONG_BINGET):
                end = position + (2 if opcode == _BINGET else 5)
                item = memo[
                    raw[position + 1] if opcode == _BINGET else int.from_bytes(raw[position + 1 : end], "little")
                ]
                if type(item) not in LEAVES:
                    shared.add(id(item))
                # A class fetched from the memo mostly begins an instance: try the shortcut.
                elif type(item) is Named and (found := self._instances.follow(item, end, self._limit)) is not None:
                    item, end = found
                items.append(item)
                position = end
            elif opcode == _BININT1:
                items.append(raw[position + 1])
                position += 2
            elif opcode == _STOP:
                return self._stack.only_item()
            else:
                position = self._rare(opcode, position)
                items = self._stack.items

    def _leave_frame(self, position: int) -> None:
        # C's unpickler drops the rest of a frame here, and Python's raises: they would read different values.
        if position > self._limit:
            raise PickleUnsafe(_BEYOND)
        if not self._is_framed:
            raise PickleUnsafe("breaks off")
        self._is_framed, self._limit = False, len(self._raw)

    def _rare(self, opcode: int, position: int) -> int:
        """Follows one opcode; returns where the next one is."""
        entry = _OPCODES.get(opcode)
        # INST, OBJ, EXT and the text opcodes: no current pickler writes them, and some import by themselves.
        if entry is None:
            raise PickleUnsafe(f"uses the pickle opcode {opcode:#04x}, which no pickler of a checkpoint writes")
        start = position + 1
        end = start + entry.width
        if entry.is_sized:
            start, end = end, end + int.from_bytes(self._raw[start:end], "little")
        # Also bounds the length: a slice beyond the end would silently be short.
        if end > self._limit:
            raise PickleUnsafe(_BEYOND)
        if entry.value is not None:
            self._stack.items.append(entry.value(self._raw[start:end]))
        elif entry.step is not None:
            entry.step(self._stack)
        elif entry.special is not None:
            return entry.special(self, start, end)
        return end

    # Special opcodes -------------------------------------------------------------------------------------------------

    def protocol(self, start: int, end: int) -> int:
        # A later protocol may give known opcodes another meaning.
        if self._raw[start] > _PROTOCOL_MAX:
            raise PickleUnsafe("has an unknown protocol")
        return end

    def frame(self, start: int, end: int) -> int:
        frame_end = end + _unsigned(self._raw[start:end])
        # CPython's two unpicklers treat nested and overlong frames differently.
        if self._is_framed or frame_end > self._limit:
            raise PickleUnsafe("has a frame inside a frame, or one that extends beyond its end")
        self._is_framed, self._limit = True, frame_end
        return end

    def put_memo(self, start: int, end: int) -> int:
        # In order only: C's unpickler allocates its memo up to the largest index.
        if _unsigned(self._raw[start:end]) != len(self._memo):
            raise PickleUnsafe("fills its memo out of order")
        self._memo.append(self._stack.items[-1])
        return end

    def name_lines(self, start: int, end: int) -> int:
        middle = self._raw.index(b"\n", start, self._limit)
        end = self._raw.index(b"\n", middle + 1, self._limit)
        self._stack.items += (self._raw[start:middle].decode(), self._raw[middle + 1 : end].decode())
        self._stack.name()
        return end + 1


class _Opcode(NamedTuple):
    """How the follower handles one opcode.

    `width`: bytes of its argument, or (`is_sized`) of the argument's length. One of the other fields is set.

    `value` makes the pushed item from the argument; `step` works on the stack; `special` handles the whole opcode.
    """

    width: int = 0
    is_sized: bool = False
    value: Callable[[bytes], Any] | None = None
    step: Callable[[Stack], None] | None = None
    special: Callable[[_Follower, int, int], int] | None = None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _data(raw: bytes) -> bytes:
    return raw


def _unsigned(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _float(raw: bytes) -> float:
    (number,) = struct.unpack(">d", raw)
    return float(number)


_OPCODES = {
    0x80: _Opcode(1, special=_Follower.protocol),  # PROTO
    0x95: _Opcode(8, special=_Follower.frame),  # FRAME
    ord("q"): _Opcode(1, special=_Follower.put_memo),  # BINPUT
    ord("r"): _Opcode(4, special=_Follower.put_memo),  # LONG_BINPUT
    ord("c"): _Opcode(special=_Follower.name_lines),  # GLOBAL
    0x8C: _Opcode(1, is_sized=True, value=_text),  # SHORT_BINUNICODE
    ord("X"): _Opcode(4, is_sized=True, value=_text),  # BINUNICODE
    0x8D: _Opcode(8, is_sized=True, value=_text),  # BINUNICODE8
    ord("C"): _Opcode(1, is_sized=True, value=_data),  # SHORT_BINBYTES
    ord("B"): _Opcode(4, is_sized=True, value=_data),  # BINBYTES
    0x8E: _Opcode(8, is_sized=True, value=_data),  # BINBYTES8
    ord("M"): _Opcode(2, value=_unsigned),  # BININT2
    ord("J"): _Opcode(4, value=_signed),  # BININT
    0x8A: _Opcode(1, is_sized=True, value=_signed),  # LONG1
    ord("G"): _Opcode(8, value=_float),  # BINFLOAT
    ord("N"): _Opcode(value=lambda _: None),  # NONE
    0x88: _Opcode(value=lambda _: True),  # NEWTRUE
    0x89: _Opcode(value=lambda _: False),  # NEWFALSE
    ord(")"): _Opcode(value=lambda _: ()),  # EMPTY_TUPLE
    ord("]"): _Opcode(value=lambda _: []),  # EMPTY_LIST
    ord("}"): _Opcode(value=lambda _: Pairs()),  # EMPTY_DICT
    0x8F: _Opcode(value=lambda _: Elements()),  # EMPTY_SET
    ord("("): _Opcode(step=Stack.mark),  # MARK
    ord("t"): _Opcode(step=Stack.close_tuple),  # TUPLE
    0x91: _Opcode(step=Stack.close_frozenset),  # FROZENSET
    0x85: _Opcode(step=Stack.tuple_of_1),  # TUPLE1
    0x86: _Opcode(step=Stack.tuple_of_2),  # TUPLE2
    0x87: _Opcode(step=Stack.tuple_of_3),  # TUPLE3
    ord("a"): _Opcode(step=Stack.append),  # APPEND
    ord("e"): _Opcode(step=Stack.append_all),  # APPENDS
    ord("s"): _Opcode(step=Stack.set_item),  # SETITEM
    ord("u"): _Opcode(step=Stack.set_all),  # SETITEMS
    0x90: _Opcode(step=Stack.add_all),  # ADDITEMS
    0x93: _Opcode(step=Stack.name),  # STACK_GLOBAL
    0x81: _Opcode(step=Stack.new_instance),  # NEWOBJ
    ord("R"): _Opcode(step=Stack.call),  # REDUCE
    ord("b"): _Opcode(step=Stack.build),  # BUILD
    ord("Q"): _Opcode(step=Stack.store),  # BINPERSID
}
