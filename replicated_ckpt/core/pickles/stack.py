"""The stack of a pickle's opcodes, with nodes of a tree in place of real objects."""

from typing import Any

from replicated_ckpt.core.pickles.tree import Elements, FrozenElements, Made, Named, Pairs, PickleUnsafe, Stored


class Stack:
    """`items` are those above the last mark. `shared`: ids of nodes that were used a second time, and must not change."""

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

    # Containers are whole before they are used a second time ------------------------------------------------------

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
        """The container on top, or the contents of an instance on top, made as `kind` if there are none."""
        target = self._new()
        if type(target) is not Made or target.state is not None:
            return target
        if target.contents is None:
            target.contents = kind()
        return target.contents

    def _new(self) -> Any:
        """The node on top. Raises PickleUnsafe: another node refers to it already."""
        # A change after the second use could build a circle, or values that two unpicklers read differently.
        if id(self.items[-1]) in self._shared:
            raise PickleUnsafe("changes an object after its use")
        return self.items[-1]

    # Names and what is made of them ------------------------------------------------------------------------------

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
