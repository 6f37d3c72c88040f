"""Lineages: which run a save belongs to, and which of two saves of one run is the newer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isnan
from operator import index
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_lineage


@dataclass(frozen=True)
class Version:
    """One save as others compare it. Versions of one lineage have an order; those of several have none."""

    lineage: str
    sequence: int
    created_unix_s: float
    save_id: str

    @property
    def order(self) -> tuple[int, float, str]:
        """The larger is the newer. The clock decides only between groups of nodes that did not know of each other."""
        return self.sequence, 0.0 if isnan(self.created_unix_s) else self.created_unix_s, self.save_id

    def is_newer_than(self, other: "Version") -> bool:
        return self.lineage == other.lineage and self.order > other.order


@dataclass(frozen=True)
class History:
    """What a store knows of one lineage: its largest sequence, and when its newest save was made by the clock.

    `created_unix_s` 0: it holds none of its saves, and has heard of them only.
    """

    sequence: int
    created_unix_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Histories = Mapping[str, History]
"""By lineage."""

BELIEVED_AHEAD = 1 << 24
"""A sequence that is only told is believed so far beyond what is known otherwise: at one save a second, half a year's.

From there a liar needs 2 ** 29 saves, and has to lie before each, until sequences reach SEQUENCE_FLOOR_MAX.
"""


def believe(told: int, known: int) -> int:
    """What is believed of a sequence that another machine told, where `known` was found otherwise."""
    return min(told, known + BELIEVED_AHEAD, SEQUENCE_FLOOR_MAX)


def order_by_age(versions: Iterable[Version]) -> Callable[[Version], tuple[float, str, tuple[int, float, str]]]:
    """The sort key of these: the lineage that was saved last comes last, and in each the newest save."""
    newest: dict[str, float] = {}
    for version in versions:
        newest[version.lineage] = max(newest.get(version.lineage, 0.0), version.order[1])
    return lambda version: (newest[version.lineage], version.lineage, version.order)


def histories_of(versions: Iterable[Version]) -> dict[str, History]:
    """What these saves tell of their lineages."""
    return merge_histories(
        {version.lineage: History(min(version.sequence, SEQUENCE_FLOOR_MAX), version.order[1])} for version in versions
    )


def merge_histories(told: Iterable[Histories]) -> dict[str, History]:
    """What several stores know together."""
    merged: dict[str, History] = {}
    for histories in told:
        for lineage, history in histories.items():
            known = merged.get(lineage, History(0))
            merged[lineage] = History(
                max(known.sequence, history.sequence), max(known.created_unix_s, history.created_unix_s)
            )
    return merged


def histories_from_json(fields: Mapping[str, Any]) -> dict[str, History]:
    """As nodes and buckets tell them, validated.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: they are none; the caller names who said so.
    """
    found = {}
    for lineage, told in fields.items():
        history = History(index(told["sequence"]), moment(told["created_unix_s"]))
        if not is_lineage(lineage) or not 0 <= history.sequence <= SEQUENCE_FLOOR_MAX:
            raise ValueError(f"no valid history of lineage {lineage!r}: {history!r}"[:500])
        found[lineage] = history
    return found


def newest_lineage(histories: Histories) -> str | None:
    """The lineage whose newest save was made last, by the clock; None where no store holds a save of any."""
    held = [lineage for lineage, history in histories.items() if history.created_unix_s > 0]
    return max(held, key=lambda lineage: (histories[lineage].created_unix_s, lineage), default=None)


def newest_version(histories: Histories, lineage: str) -> Version:
    """As the newest save of a lineage that is known: of which save it is, its history does not say."""
    newest = histories[lineage]
    return Version(lineage, newest.sequence, newest.created_unix_s, "")


def moment(value: object) -> float:
    """A time stamp that another machine told.

    Raises:
        TypeError, ValueError: it is no number, or no time since 1970 that a clock can show.
    """
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    if not is_moment(value):
        raise ValueError("expected a time stamp since 1970, found a number that is none")
    return float(value)


def is_moment(value: float) -> bool:
    """Whether a number is a time stamp: seconds since 1970."""
    return 0 <= value < 1 << 62
