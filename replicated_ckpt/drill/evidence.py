"""The specification of a job and the reports of its ranks, as JSON files. Without torch, which only ranks import."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The work of every rank of one job: load, train and save up to `end_step`, report, and then stop or train on.

    A rank tries `loads` in this order. It trains if there are none, or if the last one succeeded.
    """

    results: str
    data: str
    device: str
    width: int
    seed: int
    global_batch: int
    copies: int
    loads: tuple[str, ...]
    save_steps: tuple[int, ...]
    end_step: int
    trains_on: bool
    limit_s: float
    object_store: str | None = None
    storage_options: Mapping[str, Any] | None = None

    def write_spec(self, path: Path) -> None:
        """Writes the spec for the ranks."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read_spec(cls, path: Path) -> Self:
        """Reads the file of `write_spec`."""
        raw = json.loads(path.read_text())
        return cls(**raw | {"loads": tuple(raw["loads"]), "save_steps": tuple(raw["save_steps"])})


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One save on one rank."""

    checkpoint_id: str
    step: int
    seconds: float
    shards: tuple[str, ...]
    copies_made: int


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """The writer's `wait` on one rank: the checkpoints that are in the object store now."""

    checkpoint_ids: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """One exception of a failed load: its rank, if DCP gathered it, and the shards that it names."""

    type_name: str
    message: str
    rank: int | None = None
    shards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One load on one rank. `raised` is the exception's type name, None after a success."""

    requested: str
    seconds: float
    checkpoint_id: str | None = None
    step: int | None = None
    bytes_local: int = 0
    bytes_peer: int = 0
    bytes_object: int = 0
    bytes_shared: int = 0
    bad_copies: tuple[str, ...] = ()
    raised: str | None = None
    failures: tuple[LoadFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank, which it writes once: at its end step, or after a failed load."""

    rank: int
    saves: tuple[SaveRecord, ...]
    loads: tuple[LoadRecord, ...]
    loss_by_step: Mapping[int, float]
    wait: WaitRecord | None = None

    def write_report(self, results: Path) -> None:
        """Writes the report into the folder `results`."""
        write_json(results / f"rank-{self.rank}.json", dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class Evidence:
    """The results of a job: a report per rank, in rank order, and digests by moment and FQN.

    Moments are `saved-<checkpoint id>`, `loaded-<checkpoint id>` and `end`.
    """

    reports: tuple[RankReport, ...]
    digests: Mapping[str, Mapping[str, str]]

    @classmethod
    def read_evidence(cls, results: Path) -> Self:
        """Reads the results folder of a job whose ranks have all reported."""
        reports = [_report(json.loads(path.read_text())) for path in results.glob("rank-*.json")]
        digests = {
            path.stem.removeprefix("digests-"): json.loads(path.read_text()) for path in results.glob("digests-*.json")
        }
        return cls(tuple(sorted(reports, key=attrgetter("rank"))), digests)


def write_digests(results: Path, moment: str, digests: Mapping[str, str]) -> None:
    """Writes the digest of every tensor at this moment."""
    write_json(results / f"digests-{moment}.json", dict(digests))


def count_reports(results: Path) -> int:
    """Number of ranks that have reported."""
    return sum(1 for _ in results.glob("rank-*.json"))


def write_json(path: Path, value: object) -> None:
    """Writes a file that appears completely or not at all, for readers that poll."""
    # A name that the readers' glob does not match: they would take half a report for a complete one.
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def _report(raw: dict[str, Any]) -> RankReport:
    return RankReport(
        rank=raw["rank"],
        saves=tuple(SaveRecord(**save | {"shards": tuple(save["shards"])}) for save in raw["saves"]),
        loads=tuple(_load(load) for load in raw["loads"]),
        loss_by_step={int(step): loss for step, loss in raw["loss_by_step"].items()},
        wait=WaitRecord(tuple(raw["wait"]["checkpoint_ids"]), raw["wait"]["seconds"]) if raw["wait"] else None,
    )


def _load(raw: dict[str, Any]) -> LoadRecord:
    failures = tuple(LoadFailure(**failure | {"shards": tuple(failure["shards"])}) for failure in raw["failures"])
    return LoadRecord(**raw | {"bad_copies": tuple(raw["bad_copies"]), "failures": failures})
