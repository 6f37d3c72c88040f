"""The parts of a checkpoint. A rank writes a file for each part that it has, so a part can be removed without the others.

The number in a shard's name tells its part: each save has NUMBERS_PER_SAVE numbers, and a part's file has the first of them
plus the part. So `__4_0.distcp` and `__4_1.distcp` are the weights and the optimizer of rank 4.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from functools import lru_cache

from replicated_ckpt.core.layout import ShardName


class Part(IntEnum):
    """A part of a checkpoint. WEIGHTS also has what is too small for a file of its own."""

    WEIGHTS = 0
    OPTIMIZER = 1
    REST = 2
    UNCHANGED = 3


NUMBERS_PER_SAVE = len(Part)

_WEIGHTS = re.compile(r"(model|module|network|net|ema)(s|_state|_states|_state_dict|_\d+)?|state_dict")
_OPTIMIZER = re.compile(r"optim(izer)?(s|_state|_states|_state_dict|_\d+)?")
_DEPTH = 2
"""So many first parts of a name are looked at: `app.optimizer.state` is an optimizer's, `model.block.optimizer` is not."""


def part_of_entry(fqn: str) -> Part:
    """The part of an entry by its FQN, by the names that people and frameworks use. The first part that matches counts."""
    return _part_of_names(*fqn.split(".", _DEPTH)[:_DEPTH])


@lru_cache(maxsize=4096)  # a state has 10,000 names, and few first parts of them
def _part_of_names(*names: str) -> Part:
    for name in names:
        if _OPTIMIZER.fullmatch(name):
            return Part.OPTIMIZER
        if _WEIGHTS.fullmatch(name):
            return Part.WEIGHTS
    return Part.REST


def part_of_shard(name: str) -> Part:
    """The part of a shard file, by its name. ValueError: it is not a name of a shard."""
    shard = ShardName.parse(name)
    if shard is None:
        raise ValueError(f"{name!r} is not the name of a shard")
    return Part(shard.index % NUMBERS_PER_SAVE)


def is_optimizer_of(name: str, shards: Iterable[str]) -> bool:
    """Whether a shard file has the name of an optimizer's file of the save with these shards."""
    shard = ShardName.parse(name)
    if shard is None or part_of_shard(name) is not Part.OPTIMIZER:
        return False
    return any(_save_number(other) == shard.index // NUMBERS_PER_SAVE for other in shards)


def _save_number(shard: str) -> int | None:
    parsed = ShardName.parse(shard)
    return None if parsed is None else parsed.index // NUMBERS_PER_SAVE


PREFIXES_MAX = 64


def prefixes_of(gone: Iterable[str], kept: Iterable[str]) -> tuple[str, ...]:
    """The shortest prefixes of names of the entries that go which no entry that stays has; the first names, if too many.

    Of `app.optimizer.state` beside `app.model.weight` it is `app.optimizer`.
    """
    staying = {prefix for name in kept for prefix in _prefixes(name)}
    gone = set(gone)
    found = {next((prefix for prefix in _prefixes(name) if prefix not in staying), name) for name in gone}
    if len(found) > PREFIXES_MAX:
        found = {name.split(".", 1)[0] for name in gone}
    return tuple(sorted(found)[:PREFIXES_MAX])


def is_dropped(fqn: str, prefixes: Collection[str]) -> bool:
    """Whether an entry that a checkpoint does not have may be one of those with these prefixes that were dropped."""
    return any(prefix in prefixes for prefix in _prefixes(fqn))


def _prefixes(fqn: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    end = -1
    while (end := fqn.find(".", end + 1)) >= 0:
        yield fqn[:end]
    yield fqn
