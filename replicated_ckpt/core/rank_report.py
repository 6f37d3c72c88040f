"""One rank's part in a save or load, as the rank reports it to its own node's agent after the end."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Literal, Self

Kind = Literal["save", "load"]
_TEXT_CHARS_MAX = 1024
_NAME = re.compile(r"[a-z][a-z_]{0,31}")
_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_ENTRIES_MAX = 16
_COUNT_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class RankReport:
    """The part of one rank. `error` is the class of the error with which it failed, and "" if it succeeded.

    `ended_unix_s` is this rank's wall clock at the end, `seconds` the time since its begin. `phases` are seconds by phase,
    which overlap. `sizes` are bytes: of a save `written`, `replicated` and `linked`; of a load `local`, `peer`, `object`
    and `shared`. `divergences`: the values that a save has found to differ, at rank 0. `bad_copies`: those that a load met.
    """

    kind: Kind
    checkpoint_id: str
    save_id: str
    rank: int
    host: str
    ended_unix_s: float
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    copies: int = 0
    divergences: int = 0
    bad_copies: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Unknown fields of another version are ignored.

        Raises:
            KeyError, TypeError, ValueError: the fields are no report.
        """
        kind, error = fields["kind"], fields.get("error", "")
        if kind not in ("save", "load"):
            raise ValueError(f"neither a save nor a load: {str(kind)[:80]!r}")
        # It becomes a label of a metric.
        if error and not _CLASS.fullmatch(error):
            raise ValueError(f"no class of an error: {str(error)[:80]!r}")
        return cls(
            kind,
            _check_text(fields["checkpoint_id"]),
            _check_text(fields["save_id"]),
            _check_count(fields["rank"]),
            _check_text(fields["host"]),
            _check_seconds(fields["ended_unix_s"]),
            _check_seconds(fields["seconds"]),
            {name: _check_seconds(value) for name, value in _check_entries(fields.get("phases", {})).items()},
            {name: _check_count(value) for name, value in _check_entries(fields.get("sizes", {})).items()},
            _check_count(fields.get("copies", 0)),
            _check_count(fields.get("divergences", 0)),
            _check_count(fields.get("bad_copies", 0)),
            error,
        )


def _check_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_CHARS_MAX or not value.isprintable():
        raise ValueError(f"no printable text: {str(value)[:80]!r}")
    return value


def _check_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"no seconds: {str(value)[:80]!r}")
    return float(value)


def _check_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _COUNT_MAX:
        raise ValueError(f"no count: {str(value)[:80]!r}")
    return value


def _check_entries(values: Any) -> Mapping[str, Any]:
    """Numbers by name. Each name becomes a label of a metric, so their number is bounded."""
    if not isinstance(values, dict) or len(values) > _ENTRIES_MAX or not all(map(_NAME.fullmatch, values)):
        raise ValueError(f"no numbers by name: {str(values)[:80]!r}")
    return values
