"""Comparison of replicas: the hashes that ranks report of their values, and the values whose hashes differ."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from replicated_ckpt.wording import list_some, plural

_UNIT = struct.Struct("<QI")
DIVERGENCES_MAX = 32
"""Limit for a manifest: a diverged model has thousands, and the first ones show where they begin."""
_NAMED_MAX, _RANKS_NAMED_MAX = 4, 8


@dataclass(frozen=True)
class Turn:
    """The part of the values that one save compares: `part` of `parts`."""

    part: int
    parts: int


@dataclass(frozen=True)
class Divergence:
    """A value of one name that differs between ranks.

    `fqn`, `offset`: the entry, and the place of its differing piece. `first_byte`: where the compared range of the
    piece begins. `saved_by`: the rank whose bytes are in the checkpoint. `groups`: ranks with equal bytes; the group of
    `saved_by` is first.
    """

    fqn: str
    offset: tuple[int, ...]
    first_byte: int
    is_object: bool
    saved_by: int
    groups: tuple[tuple[int, ...], ...]

    def describe(self, host_by_rank: Mapping[int, str]) -> str:
        at = f" at {self.offset}" if any(self.offset) else ""
        at += f", from byte {self.first_byte}" if self.first_byte else ""
        saved, *others = self.groups
        same = [rank for rank in saved if rank != self.saved_by]
        alike = f"; the same bytes on {_name_ranks(same, host_by_rank)}" if same else ""
        differing = list_some([_name_ranks(group, host_by_rank) for group in others], _RANKS_NAMED_MAX)
        return f"{self.fqn}{at}: saved from {_name_ranks([self.saved_by], host_by_rank)}{alike}; other bytes on {differing}"


def _name_ranks(ranks: Sequence[int], host_by_rank: Mapping[int, str]) -> str:
    named = [f"{rank} on {host_by_rank[rank]}" if rank in host_by_rank else str(rank) for rank in ranks]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {list_some(named, _RANKS_NAMED_MAX)}"


def describe_divergences(found: Sequence[Divergence], host_by_rank: Mapping[int, str]) -> str:
    """One text for all divergences. The first ones are described in full."""
    shown = " | ".join(one.describe(host_by_rank) for one in found[:_NAMED_MAX])
    left = len(found) - _NAMED_MAX
    return shown + (f" | and {plural(left, 'more value')}" if left > 0 else "")


def may_entry_differ(fqn: str, may_differ: Sequence[str]) -> bool:
    """Whether the name of an entry matches one of these patterns (`fnmatch`)."""
    return any(fnmatchcase(fqn, pattern) for pattern in may_differ)


def without_allowed(found: Iterable[Divergence], may_differ: Sequence[str]) -> list[Divergence]:
    """The divergences of entries whose names match none of these patterns."""
    return [one for one in found if not may_entry_differ(one.fqn, may_differ)]


def pack_units(hash_by_key: Mapping[int, int]) -> bytes:
    """The report of one rank: for each unit its key (64 bits) and the hash of its value (32 bits). Equal units give
    equal reports.
    """
    return b"".join(_UNIT.pack(key, hash_by_key[key]) for key in sorted(hash_by_key))


def find_differing(reports: Mapping[int, bytes]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The units whose values differ: by key, the groups of ranks with equal values.

    `reports`: by rank, the bytes from `pack_units`. Equal reports are decoded once: ranks that each have the whole state
    usually send equal ones.

    Raises:
        ValueError: a report has a wrong size.
    """
    ranks_by_report: dict[bytes, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks_by_report.setdefault(report, []).append(rank)
    first: dict[int, int] = {}
    seen: list[tuple[dict[int, int], list[int]]] = []
    differing: set[int] = set()
    for report, ranks in ranks_by_report.items():
        if len(report) % _UNIT.size:
            raise ValueError(f"a report of replicas has {len(report)} bytes")
        units = dict(_UNIT.iter_unpack(report))
        seen.append((units, ranks))
        differing.update(key for key, value in units.items() if first.setdefault(key, value) != value)
    found = {}
    for key in differing:
        by_value: dict[int, list[int]] = {}
        for units, ranks in seen:
            if key in units:
                by_value.setdefault(units[key], []).extend(ranks)
        found[key] = tuple(sorted(tuple(sorted(ranks)) for ranks in by_value.values()))
    return found
