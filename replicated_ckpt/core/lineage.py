"""Lineages: the run of a save, and the order of the saves of one run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isnan
from operator import index
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_lineage


@dataclass(frozen=True)
class Version:
    """The fields by which saves are compared. Versions of one lineage are ordered; those of different ones are not."""

    lineage: str
    sequence: int
    created_unix_s: float
    save_id: str

    @property
    def order(self) -> tuple[int, float, str]:
        """A sort key: the larger one is newer. The clock decides only between equal sequences, of nodes without contact."""
        # NaN compares with nothing: sorting would depend on the order of the input.
        return self.sequence, 0.0 if isnan(self.created_unix_s) else self.created_unix_s, self.save_id

    def is_newer_than(self, other: "Version") -> bool:
        return self.lineage == other.lineage and self.order > other.order  # I3: never across lineages


@dataclass(frozen=True)
class History:
    """One lineage as a store records it: its largest sequence, and the time of its newest save by the clock.

    `created_unix_s` is 0 if the store has no save of the lineage, and only other nodes have reported it.
    """

    sequence: int
    created_unix_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Histories = Mapping[str, History]
"""By lineage."""

ACCEPTED_AHEAD_MAX = 1 << 24
"""A reported sequence counts up to this much above the known one: half a year of one save per second.

With this limit a hostile node needs 2 ** 29 saves, with a false report before each, to reach SEQUENCE_FLOOR_MAX.
"""


def accept_sequence(told: int, known: int) -> int:
    """The accepted part of a sequence that another machine reported; `known` is from this node's own files."""
    return min(told, known + ACCEPTED_AHEAD_MAX, SEQUENCE_FLOOR_MAX)


def order_by_age(versions: Iterable[Version]) -> Callable[[Version], tuple[float, str, tuple[int, float, str]]]:
    """The sort key of these versions: the lineage with the latest save sorts last, and within a lineage the newest save."""
    newest: dict[str, float] = {}
    for version in versions:
        newest[version.lineage] = max(newest.get(version.lineage, 0.0), version.order[1])
    return lambda version: (newest[version.lineage], version.lineage, version.order)


def histories_of(versions: Iterable[Version]) -> dict[str, History]:
    """The histories of the lineages of these saves."""
    return merge_histories(
        {version.lineage: History(min(version.sequence, SEQUENCE_FLOOR_MAX), version.order[1])} for version in versions
    )


def merge_histories(told: Iterable[Histories]) -> dict[str, History]:
    """The combined histories of several stores."""
    merged: dict[str, History] = {}
    for histories in told:
        for lineage, history in histories.items():
            known = merged.get(lineage, History(0))
            merged[lineage] = History(
                max(known.sequence, history.sequence), max(known.created_unix_s, history.created_unix_s)
            )
    return merged


def histories_from_json(fields: Mapping[str, Any]) -> dict[str, History]:
    """Parses and checks the histories that a node or a bucket has reported.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the fields are invalid. The message does not name their source:
            the caller adds it.
    """
    found = {}
    for lineage, told in fields.items():
        history = History(index(told["sequence"]), moment(told["created_unix_s"]))
        # A hostile or damaged node must not push sequences to their limit, where no save could follow.
        if not is_lineage(lineage) or not 0 <= history.sequence <= SEQUENCE_FLOOR_MAX:
            raise ValueError(f"not a valid history of lineage {lineage!r}: {history!r}"[:500])
        found[lineage] = history
    return found


def newest_lineage(histories: Histories) -> str | None:
    """The lineage whose newest save was made last, by the clock; None if no store has a save."""
    held = [lineage for lineage, history in histories.items() if history.created_unix_s > 0]
    return max(held, key=lambda lineage: (histories[lineage].created_unix_s, lineage), default=None)


def newest_version(histories: Histories, lineage: str) -> Version:
    """A version like the newest save of a known lineage, without a save id, which a history does not have."""
    newest = histories[lineage]
    return Version(lineage, newest.sequence, newest.created_unix_s, "")


def moment(value: object) -> float:
    """A validated time stamp of another machine.

    Raises:
        TypeError, ValueError: `value` is not a number, or no possible time since 1970.
    """
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    if not is_moment(value):
        raise ValueError("expected a time stamp since 1970, found an invalid number")
    return float(value)


def is_moment(value: float) -> bool:
    """Whether a number is a time stamp: seconds since 1970."""
    # Also False for NaN and infinity, which would break every comparison of versions.
    return 0 <= value < 1 << 62
