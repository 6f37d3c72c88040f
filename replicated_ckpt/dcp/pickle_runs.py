"""What a pickle of DCP metadata says a million times, an instance of a few simple fields, followed in one step.

The scan would come to the same, opcode by opcode: `tests/dcp/test_pickle_scan.py` compares the two.
"""

import re

from replicated_ckpt.dcp.pickle_items import AnyItem, Item, Kind, Making, Text, Tuples, number

_FETCH = rb"(?:h.|j.{4})"
_LONG = rb"\x8a(?:" + rb"|".join(re.escape(bytes([n])) + rb".{%d}" % n for n in range(1, 10)) + rb")"
_NUMBER = rb"(?:K.|M..|J.{4}|[N\x88\x89]|" + _LONG + rb")"
_TEXT = rb"\x8c(?:" + rb"|".join(re.escape(bytes([n])) + rb".{%d}" % n for n in range(1, 128)) + rb")\x94"
_SIZE = _FETCH + rb"(?:N\x85|NN\x86|NNN\x87)\x94\x85\x94R\x94".replace(b"N", _NUMBER)
_FIELD = rb"(" + _FETCH + rb")(" + rb"|".join((_SIZE, _FETCH, _NUMBER, _TEXT)) + rb")"
_INSTANCE = re.compile(
    rb"\)\x81\x94\}\x94\(" + _FIELD + rb"(?:" + _FIELD + rb"(?:" + _FIELD + rb"(?:" + _FIELD + rb")?)?)?ub", re.DOTALL
)
_FETCH_BYTES_MAX = 5
_SHORT_FETCH = ord("h")
_FETCHES = (_SHORT_FETCH, ord("j"))
_TEXT_OPCODE = 0x8C
_TUPLE_OF_NONE = 0x84
_CALL_BYTES = 6
"""From the opcode of the tuple of numbers to the end of the size."""
_KEY_WEIGHT_MAX = 16


class InstanceRuns:
    """Follows instances of one pickle. It adds to the scan's memo what the scan itself would have added.

    Such an instance is never changed once it is whole, so that one item stands for all that are alike.
    """

    def __init__(self, raw: bytes, memo: list[AnyItem], tuples: Tuples) -> None:
        self._raw = raw
        self._memo = memo
        self._sizes: list[tuple[AnyItem, ...]] = []
        for count in range(4):
            numbers = tuples.of((number(),) * count)
            arguments = tuples.of((numbers,))
            self._sizes.append((numbers, arguments, tuples.made_with(arguments)))
        self._made: dict[tuple[int, int], tuple[Item, Item]] = {}
        self._weight_by_key: dict[bytes, int] = {}

    def followed(self, cls: AnyItem, position: int) -> tuple[Item, int, int] | None:
        """The instance of `cls` whose arguments begin at `position`, where it ends, and how much it hashes.

        None: it is not as picklers write them, and the scan has to go on by itself. Nothing is added then.

        Raises:
            MetadataUnsafe: a field is no value, or nested too deep.
        """
        match = _INSTANCE.match(self._raw, position)
        if match is None or cls.kind != Kind.NAMED or cls.making is not Making.STATE:
            return None
        memo, weight, depth, hashed = self._memo, 1, 1, 0
        added: list[AnyItem] = []
        parts = match.groups()
        try:
            for at in range(0, len(parts), 2):
                key, value = parts[at], parts[at + 1]
                if key is None:
                    break
                hashed += self._weight_by_key.get(key) or self._learned(key)
                first = value[0]
                if first not in _FETCHES:
                    weight += self._text(value, match.start(at + 2), added) if first == _TEXT_OPCODE else 1
                    continue
                is_fetch = len(value) <= _FETCH_BYTES_MAX
                item = memo[int.from_bytes(value[1:], "little")] if is_fetch else self._size(value, added)
                item.is_shared = True
                weight += item.weight
                if item.depth >= depth:
                    depth = item.depth + 1
        except LookupError:
            return None
        instance, state = self._instance(weight + hashed, depth)
        memo += (instance, state, *added)
        return instance, match.end(), hashed

    def _learned(self, fetch: bytes) -> int:
        """The weight of a key, a short text.

        Raises:
            LookupError: it is none.
        """
        key = self._memo[int.from_bytes(fetch[1:], "little")]
        if key.kind != Kind.TEXT or key.weight > _KEY_WEIGHT_MAX:
            raise LookupError
        key.is_shared = True
        self._weight_by_key[fetch] = key.weight
        return key.weight

    def _text(self, value: bytes, start: int, added: list[AnyItem]) -> int:
        text = Text(start + 2, start + len(value) - 1)
        added.append(text)
        return text.weight

    def _size(self, value: bytes, added: list[AnyItem]) -> AnyItem:
        """The size that a call of what is fetched makes.

        Raises:
            LookupError: it is not what makes sizes.
        """
        fetch = value[:2] if value[0] == _SHORT_FETCH else value[:5]
        called = self._memo[int.from_bytes(fetch[1:], "little")]
        called.is_shared = True
        if called.kind != Kind.NAMED or called.making is not Making.SIZE:
            raise LookupError
        made = self._sizes[value[-_CALL_BYTES] - _TUPLE_OF_NONE]
        added += made
        return made[-1]

    def _instance(self, weight: int, depth: int) -> tuple[Item, Item]:
        """An instance and its state whose fields weigh this much together and are nested this deep, the state included."""
        found = self._made.get((weight, depth))
        if found is None:
            state = Item(Kind.DICT)
            state.add((Item(Kind.SCALAR, weight - 1, depth - 1),))
            instance = Item(Kind.INSTANCE, 2, 2, Making.STATE)
            instance.add((state,))
            instance.is_built = instance.is_shared = state.is_shared = True
            found = self._made[weight, depth] = instance, state
        return found
