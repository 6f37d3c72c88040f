"""The results of a run: rows of samples, which suites create and reports read."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Work = Literal["save", "load", "recover", "block", "p50", "p99", "lap", "probe"]
Sample = Mapping[str, float]  # the fields of benchmarks.rank.cost.Sample


@dataclass(frozen=True)
class Row:
    """One case in one setup. `base` is the case of the same setup that it is compared with.

    `limit_s` is the least time that the machine needs. `x` is the size of a case that grows. If there are no samples,
    `note` has the reason.
    """

    suite: str
    setup: str
    work: Work
    case: str
    base: str
    state_bytes: int
    samples: Sequence[Sample] = ()
    limit_s: float | None = None
    x: float | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(sample["seconds"] for sample in self.samples)

    @property
    def settled_s(self) -> float:
        return statistics.median(sample["settled_s"] for sample in self.samples)

    @property
    def efficiency(self) -> float | None:
        return self.limit_s / self.seconds if self.limit_s is not None and self.samples else None

    def cpu_s_per_gb(self, who: Literal["rank", "agent"]) -> float:
        return statistics.median(sample[f"{who}_cpu_s"] for sample in self.samples) / self.state_bytes * 1e9

    def peak_bytes(self, who: Literal["rank", "agent"]) -> float:
        return max(0.0, statistics.median(sample[f"{who}_peak_bytes"] for sample in self.samples))


@dataclass
class Results:
    """A whole run. `skipped` lists what did not run here, with reasons. `failed` names suites whose ranks failed."""

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def of(self, suite: str) -> list[Row]:
        return [row for row in self.rows if row.suite == suite]

    def base_of(self, row: Row) -> Row | None:
        for other in self.rows:
            same = (other.suite, other.setup, other.work, other.x) == (row.suite, row.setup, row.work, row.x)
            if same and other.case == row.base and other.samples:
                return other
        return None

    def ratio(self, row: Row) -> float | None:
        """The median over the rounds of the row's time divided by its base's time in the same round."""
        base = self.base_of(row)
        if base is None or not row.samples:
            return None
        pairs = zip(row.samples, base.samples, strict=False)
        return statistics.median(own["seconds"] / other["seconds"] for own, other in pairs)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(document: Mapping[str, Any]) -> Results:
    rows = [Row(**row) for row in document["rows"]]
    return Results(document["machine"], document["options"], rows, list(document["skipped"]), list(document["failed"]))


def distinct(values: Iterable[str]) -> list[str]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(values))
