"""A shortcut of the follower for instances of up to four simple fields, which DCP's metadata has by the million.

The result equals that of single opcodes: `tests/core/formats/test_pickle_follower.py` compares the two.
"""

import re
from functools import cache
from typing import Any

from replicated_ckpt.core.pickles.tree import LEAVES, Fields, Made, Named

_FETCH = rb"(?:h.|j.{4})"
_LONG = rb"\x8a(?:" + rb"|".join(re.escape(bytes([n])) + rb".{%d}" % n for n in range(1, 10)) + rb")"
_SMALL = rb"(?:K.|M..|J.{4}|[N\x88\x89])"
_TEXT_CHARS_MAX = 127
_TEXT = rb"(?>\x8c.{2,%d}?\x94)" % (_TEXT_CHARS_MAX + 1)
"""Matches up to the first byte that may end the text. One alternative per length would compile ten times as long."""
_SIZE = _FETCH + rb"(?:N\x85|NN\x86|NNN\x87)\x94\x85\x94R\x94".replace(b"N", _SMALL)
_FIELD = rb"(" + _FETCH + rb")(" + rb"|".join((_SIZE, _FETCH, _SMALL, _LONG, _TEXT)) + rb")"
_INSTANCE = rb"\)\x81\x94\}\x94\(" + _FIELD + rb"(?:" + _FIELD + rb"(?:" + _FIELD + rb"(?:" + _FIELD + rb")?)?)?ub"
_FETCHES = (ord("h"), ord("j"))
_FETCH_BYTES_MAX = 5
_TEXT_OPCODE, _BYTE, _SHORT, _INT = 0x8C, ord("K"), ord("M"), ord("J")
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_TEXT_FRAME_BYTES = 3
"""Bytes around a text in the pattern: its opcode, its length and the opcode behind it."""
_CALL_BYTES = 6
"""From the opcode of the tuple of numbers to the end of the size."""


class Instances:
    """Follows instances of one pickle. It adds the same entries to `memo` and `shared` as the follower would.

    Calls with the same bytes become one node, since such nodes never change.
    """

    def __init__(self, raw: bytes, memo: list[Any], shared: set[int]) -> None:
        self._raw = raw
        self._memo = memo
        self._shared = shared
        self._instance, self._number = _compile()
        self._calls: dict[bytes, tuple[tuple[Any, ...], tuple[Any, ...], Made]] = {}

    def follow(self, cls: Named, position: int, limit: int) -> tuple[Made, int] | None:
        """The instance of `cls` whose arguments begin at `position`, and its end, at most `limit`.

        None: the bytes do not match the pattern, and nothing was added. The follower then continues by single opcodes.
        """
        if self._raw[position : position + 1] != b")":
            return None
        match = self._instance.match(self._raw, position, limit)
        if match is None:
            return None
        memo = self._memo
        added: list[Any] = []
        state = Fields()
        parts = match.groups()
        try:
            for at in range(0, len(parts), 2):
                fetch, value = parts[at], parts[at + 1]
                if fetch is None:
                    break
                key = memo[int.from_bytes(fetch[1:], "little")]
                # An attribute name from the memo that is not text: not as picklers write instances.
                if type(key) is not str:
                    return None
                state[key] = self._value(value, added)
        # A fetch beyond the memo: the follower reports it with its own error.
        except (LookupError, UnicodeDecodeError):
            return None
        # Memo and shared change only from here on: before, the follower may still take over.
        made = Made(cls, (), is_new=True)
        made.state = state
        memo += (made, state, *added)
        return made, match.end()

    def _value(self, value: bytes, added: list[Any]) -> Any:
        opcode = value[0]
        if opcode in _FETCHES:
            if len(value) > _FETCH_BYTES_MAX:
                return self._call(value, added)
            item = self._memo[int.from_bytes(value[1:], "little")]
            if type(item) not in LEAVES:
                self._shared.add(id(item))
            return item
        if opcode == _TEXT_OPCODE:
            # A byte of the text may equal the opcode after it: only the length byte shows where the text ends.
            if value[1] != len(value) - _TEXT_FRAME_BYTES:
                raise LookupError("a byte within the text ends it for the pattern")
            text = value[2:-1].decode("utf-8", "surrogatepass")
            added.append(text)
            return text
        return _number(value)

    def _call(self, value: bytes, added: list[Any]) -> Made:
        """The node of a call whose only argument is a tuple of numbers, such as a size."""
        found = self._calls.get(value)
        if found is None:
            fetch = value[:2] if value[0] == _FETCHES[0] else value[:5]
            called = self._memo[int.from_bytes(fetch[1:], "little")]
            if type(called) is not Named:
                raise LookupError
            numbers = tuple(map(_number, self._number.findall(value, len(fetch), len(value) - _CALL_BYTES)))
            found = self._calls[value] = (numbers, (numbers,), Made(called, (numbers,), is_new=False))
        added += found
        return found[-1]


@cache
def _compile() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """The patterns of an instance and of a number. Compiled late: most agents never need them."""
    return re.compile(_INSTANCE, re.DOTALL), re.compile(_SMALL, re.DOTALL)


def _number(value: bytes) -> int | None:
    opcode = value[0]
    if opcode == _BYTE:
        return value[1]
    if opcode == _SHORT:
        return value[1] | value[2] << 8
    if opcode == _INT:
        return int.from_bytes(value[1:], "little", signed=True)
    if opcode in _CONSTANTS:
        return _CONSTANTS[opcode]
    return int.from_bytes(value[2:], "little", signed=True)
