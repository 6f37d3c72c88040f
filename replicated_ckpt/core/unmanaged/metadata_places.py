"""Where the items of a `.metadata` lie, read off the tree of its pickle: the agent needs no more, and imports no torch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import index
from typing import Any

from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import Fields, Made, Pairs, PickleUnsafe
from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.errors import MetadataUnsafe

_STATE_MAX = 128
"""Keys and values of an instance: a state may be shared by many, and each is looked through."""


def item_ranges(raw: bytes) -> Mapping[str, tuple[ByteRange, ...]]:
    """Where each shard that a `.metadata` needs must have its items, ordered by their place in it.

    Raises:
        MetadataUnsafe: it is no metadata as DCP writes it, or names a file that is no shard.
    """
    try:
        return _ranges(_attribute(follow(raw), "storage_data"))
    except PickleUnsafe as exc:
        raise MetadataUnsafe(f".metadata {exc}.") from exc


def needed_bytes(ranges: Mapping[str, tuple[ByteRange, ...]]) -> Mapping[str, int]:
    return {shard: max(item.end for item in items) for shard, items in ranges.items()}


def ranges_to_json(ranges: Mapping[str, Sequence[ByteRange]], shards: Collection[str]) -> dict[str, Any]:
    """What a node that has these shards is told of the items in them."""
    return {shard: [(item.offset, item.length) for item in ranges[shard]] for shard in shards if shard in ranges}


def ranges_from_json(fields: Mapping[str, Any]) -> Mapping[str, tuple[ByteRange, ...]]:
    """The same again. Raises TypeError, ValueError, AttributeError: it says something else."""
    found = {shard: tuple(ByteRange(index(at), index(size)) for at, size in items) for shard, items in fields.items()}
    if any(ShardName.parse(shard) is None for shard in found):
        raise ValueError("a file is named that is no shard")
    numbers = (number for items in found.values() for item in items for number in (item.offset, item.length))
    if any(not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("an item lies at no place of a file")
    return found


def _attribute(node: Any, wanted: str) -> Any:
    """One attribute of an instance, as it was set last."""
    state = node.state if type(node) is Made else None
    if type(state) is Fields and wanted in state:
        return state[wanted]
    if type(state) is Pairs and len(state) <= _STATE_MAX:
        for key, value in zip(state[-2::-2], state[::-2], strict=True):
            if type(key) is str and key == wanted:
                return value
    raise PickleUnsafe(f"has something without {wanted!r} where DCP metadata has it")


def _infos(places: Any) -> Iterator[Any]:
    """The node of each item's place. One that is shared is looked through once, however often it is met."""
    if type(places) is not Pairs:
        raise PickleUnsafe("has no places of its items")
    seen: set[int] = set()
    for info in places[1::2]:
        if id(info) not in seen:
            seen.add(id(info))
            yield info


def _ranges(places: Any) -> Mapping[str, tuple[ByteRange, ...]]:
    found: dict[str, list[ByteRange]] = {}
    for info in _infos(places):
        shard, offset, length = (_attribute(info, name) for name in ("relative_path", "offset", "length"))
        if type(shard) is not str or ShardName.parse(shard) is None:
            raise PickleUnsafe(f"has an item in {str(shard)[:200]!r}, which is no shard")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise PickleUnsafe(f"has an item at no place of {shard}")
        if max(offset, length) >= 1 << 63:
            raise PickleUnsafe(f"has an item at no place of {shard}: it has a number of more than 64 bits")
        found.setdefault(shard, []).append(ByteRange(offset, length))
    return {shard: tuple(sorted(items, key=lambda item: item.offset)) for shard, items in sorted(found.items())}
