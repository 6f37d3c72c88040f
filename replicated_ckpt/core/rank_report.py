"""One rank's part in a save or load, as the rank reports it after the end: to its node's agent, and in a file there."""

import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from math import isfinite
from typing import Any, Literal, Self

from replicated_ckpt.core.layout import is_save_id

Kind = Literal["save", "load"]
_TEXT_CHARS_MAX = 1024
_NAME = re.compile(r"[a-z][a-z_]{0,31}")
_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_ENTRIES_MAX = 16
_COUNT_MAX = (1 << 63) - 1
_NODES_MAX = 1 << 14
_SPANS_MAX = 1 << 16
_RANKS_MAX = 1 << 20


@dataclass(frozen=True)
class Span:
    """One phase, usually of one shard. `begin_s` and `end_s` count from the start of the rank's save or load.

    `busy_s`: the time between them that was spent on the phase. `node`: the node that got a copy or a request.
    `by_agent`: the node's agent did the work, not the rank.
    """

    phase: str
    begin_s: float
    end_s: float
    busy_s: float
    node: str = ""
    by_agent: bool = False

    def since(self, began_s: float, longest_s: float, *, by_agent: bool) -> "Span":
        """Converts times of the host's monotonic clock to times since `began_s`, from 0 to `longest_s`."""
        # The agent's container may have another clock: its spans must stay within the save.
        begin_s, end_s = (min(max(0.0, at - began_s), longest_s) for at in (self.begin_s, self.end_s))
        return replace(self, begin_s=begin_s, end_s=end_s, by_agent=by_agent)

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, fields: Any) -> "Span":
        """Raises TypeError, ValueError: the fields are no span."""
        phase, begin_s, end_s, busy_s, node, by_agent = fields
        if not isinstance(phase, str) or not _NAME.fullmatch(phase):
            raise ValueError(f"not a phase: {str(phase)[:80]!r}")
        times = (_check_seconds(begin_s), _check_seconds(end_s), _check_seconds(busy_s))
        return cls(phase, *times, _check_text(node), bool(by_agent))


@dataclass(frozen=True)
class RankReport:
    """The part of one rank. `error` is the class of the error with which it failed, and "" if it succeeded.

    `ended_unix_s` is this rank's wall clock at the end, `seconds` the duration. `phases` are seconds by phase; phases
    overlap. `sizes` are bytes: of a save `written`, `replicated` and `linked`; of a load `local`, `peer`, `object` and
    `shared`. `divergences`: the number of values that a save has found to differ, at rank 0. `bad_copies`: the number of
    bad copies that a load met.

    The other fields are only in the rank's file. `operation`: the save's id, or an id that all ranks of a load share.
    `seconds_by_node`: spent on sending to each node, or on reading from it. `ranks`: at rank 0, the reports of all ranks.
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
    node_id: str = ""
    operation: str = ""
    seconds_by_node: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    ranks: tuple["RankReport", ...] = ()

    @property
    def without_picture(self) -> "RankReport":
        """The report as an agent needs it for metrics."""
        return replace(self, operation="", seconds_by_node={}, spans=(), ranks=())

    def to_json(self) -> dict[str, Any]:
        spans, ranks = [span.to_json() for span in self.spans], [each.to_json() for each in self.ranks]
        return {**asdict(replace(self, spans=(), ranks=())), "spans": spans, "ranks": ranks}

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
            raise ValueError(f"not the class of an error: {str(error)[:80]!r}")
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
            _check_text(fields.get("node_id", "")),
            _check_operation(fields.get("operation", "")),
            {
                _check_text(node): _check_seconds(value)
                for node, value in _check_length(fields.get("seconds_by_node", {}), dict, _NODES_MAX).items()
            },
            tuple(map(Span.from_json, _check_length(fields.get("spans", []), list, _SPANS_MAX))),
            tuple(
                cls.from_json({**each, "ranks": []})
                for each in _check_length(fields.get("ranks", []), list, _RANKS_MAX)
            ),
        )


def _check_operation(value: Any) -> str:
    # It is a part of a file's name.
    if not isinstance(value, str) or (value and not is_save_id(value)):
        raise ValueError(f"not the id of a save or load: {str(value)[:80]!r}")
    return value


def _check_length(values: Any, kind: type[dict[Any, Any]] | type[list[Any]], most: int) -> Any:
    if not isinstance(values, kind) or len(values) > most:
        raise ValueError(f"not a {kind.__name__} of at most {most}: {str(values)[:80]!r}")
    return values


def _check_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_CHARS_MAX or not value.isprintable():
        raise ValueError(f"not a printable text: {str(value)[:80]!r}")
    return value


def _check_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"not a number of seconds: {str(value)[:80]!r}")
    return float(value)


def _check_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _COUNT_MAX:
        raise ValueError(f"not a count: {str(value)[:80]!r}")
    return value


def _check_entries(values: Any) -> Mapping[str, Any]:
    """Numbers by name. Each name becomes a label of a metric, so their number is bounded."""
    if not isinstance(values, dict) or len(values) > _ENTRIES_MAX or not all(map(_NAME.fullmatch, values)):
        raise ValueError(f"not numbers by name: {str(values)[:80]!r}")
    return values
