"""The names of items that belong to one rank: `rank-<rank>-of-<world>`, the last part of their entry's name."""

import re
from collections.abc import Iterable

_NAME = re.compile(r"(?:.*\.)?rank-[0-9]+-of-([0-9]+)", re.DOTALL)


def name_rank_item(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}"


def find_world(name: str) -> int | None:
    """Ranks of the job that saved this item; None: it is no rank's."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def worlds_under(prefix: str, names: Iterable[str]) -> tuple[int, ...]:
    """The worlds of which there are items under a prefix."""
    found = {find_world(name) for name in names if name.startswith(f"{prefix}.") and "." not in name[len(prefix) + 1 :]}
    return tuple(sorted(world for world in found if world is not None))
