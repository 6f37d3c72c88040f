"""The parts of a checkpoint. A rank writes a file for each part that it has, so a part can be removed without the
others.

The number in a shard's name identifies its part: each save has NUMBERS_PER_SAVE numbers, and the number of a part's
file is the first of them plus the part. So `__4_0.distcp` and `__4_1.distcp` are the weights and the optimizer of rank
4.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from functools import lru_cache

from replicated_ckpt.core.layout import ShardName


class Part(IntEnum):
    """A part of a checkpoint. WEIGHTS also has the entries of parts that are too small for a file of their own."""

    WEIGHTS = 0
    OPTIMIZER = 1
    REST = 2
    UNCHANGED = 3


NUMBERS_PER_SAVE = len(Part)

_WEIGHTS = re.compile(r"(model|module|network|net|ema)(s|_state|_states|_state_dict|_\d+)?|state_dict")
_OPTIMIZER = re.compile(r"optim(izer)?(s|_state|_states|_state_dict|_\d+)?")
_DEPTH = 2
"""Leading components of a name that count: `app.optimizer.state` is an optimizer's, `model.block.optimizer` is not."""


def part_of_entry(fqn: str) -> Part:
    """The part of an entry, by usual names in its FQN. The first component that matches decides."""
    return _part_of_names(*fqn.split(".", _DEPTH)[:_DEPTH])


@lru_cache(maxsize=4096)  # a state has 10,000 names, but few different leading components
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
    """Whether a shard file is an optimizer's file of the save with these shards, by its name."""
    shard = ShardName.parse(name)
    if shard is None or part_of_shard(name) is not Part.OPTIMIZER:
        return False
    return any(_save_number(other) == shard.index // NUMBERS_PER_SAVE for other in shards)


def _save_number(shard: str) -> int | None:
    parsed = ShardName.parse(shard)
    return None if parsed is None else parsed.index // NUMBERS_PER_SAVE


PREFIXES_MAX = 64


def prefixes_of(gone: Iterable[str], kept: Iterable[str]) -> tuple[str, ...]:
    """The shortest prefixes that only dropped entries have. If there are too many, the first components instead.

    If `app.optimizer.state` is dropped and `app.model.weight` stays, the prefix is `app.optimizer`.
    """
    staying = {prefix for name in kept for prefix in _prefixes(name)}
    gone = set(gone)
    found = {next((prefix for prefix in _prefixes(name) if prefix not in staying), name) for name in gone}
    if len(found) > PREFIXES_MAX:
        found = {name.split(".", 1)[0] for name in gone}
    return tuple(sorted(found)[:PREFIXES_MAX])


def is_dropped(fqn: str, prefixes: Collection[str]) -> bool:
    """Whether an entry that the checkpoint lacks may be one of the dropped entries, which had these prefixes."""
    return any(prefix in prefixes for prefix in _prefixes(fqn))


def _prefixes(fqn: str) -> Iterator[str]:
    """The name and all shorter ones: `a`, `a.b` and `a.b.c` for `a.b.c`."""
    end = -1
    while (end := fqn.find(".", end + 1)) >= 0:
        yield fqn[:end]
    yield fqn
