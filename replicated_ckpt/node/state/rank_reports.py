"""Reports of this node's ranks: the last ones as files, for `replicated-ckpt report`, and their sums, for metrics."""

import json
import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from replicated_ckpt.core.rank_report import Kind, RankReport
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

KEPT = 16
"""Saves whose reports stay, and as many loads. With 1,000 ranks, one save takes about 1 MB on rank 0's node."""
_FILE_BYTES_MAX = 64 << 20
_PREFIX, _SUFFIX = "report-", ".json"


class RankReports:
    """Files in ROOT/.agent: `report-<save or load>-<id>-<rank>.json`.

    Ranks write their own files, so that a report needs no agent. Any number of ranks may do so at once.
    """

    def __init__(self, store: LocalStore) -> None:
        self._root, self._path = store.root, store.root_agent_directory()

    def keep(self, report: RankReport) -> None:
        """Writes a report, and removes those of the oldest saves or loads. Reports are not fsynced.

        Raises:
            StoreError: the file cannot be written.
        """
        operations = f"{_PREFIX}{report.kind}-"
        name = f"{operations}{report.operation}-{report.rank}{_SUFFIX}"
        with translate_errors(str(self._root), "keep", name):
            write_file(self._path / name, json.dumps(report.to_json()).encode(), is_flushed=False)
            self._remove_old(operations)

    def _remove_old(self, operations: str) -> None:
        files_by_operation: dict[str, list[tuple[float, Path]]] = {}
        for path in self._path.glob(f"{operations}*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another rank removes old ones, too
                found = path.stat().st_mtime, path
                files_by_operation.setdefault(path.name.rpartition("-")[0], []).append(found)
        # max(): by the time of each one's newest file.
        for old in sorted(files_by_operation.values(), key=max)[:-KEPT]:
            for _, path in old:
                path.unlink(missing_ok=True)

    def read(self, checkpoint_id: str) -> list[RankReport]:
        """The reports of all saves and loads of this checkpoint that are kept here. Damaged files are left out.

        Raises:
            StoreError: the directory cannot be read.
        """
        with translate_errors(str(self._root), "read", f"{_PREFIX}*{_SUFFIX}"):
            files = sorted(self._path.glob(f"{_PREFIX}*{_SUFFIX}"))
        return [report for path in files for report in _read(path) if report.checkpoint_id == checkpoint_id]


def _read(path: Path) -> Iterator[RankReport]:
    try:
        if path.stat().st_size <= _FILE_BYTES_MAX:
            yield RankReport.from_json(json.loads(path.read_bytes()))
    # Removed since, torn by a power loss, or of another release.
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as exc:
        log.info("no report in %s: %s", path, exc)


BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Upper bounds of a histogram's buckets, in seconds: from a save into memory to one over a slow network."""
_CLASSES_MAX = 200
_OTHER = "other"

Origin = Literal["save", "load", "request", "repair", "upload"]


@dataclass
class Histogram:
    """Durations: `counts` by bucket, the last one for those above all bounds, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> "Histogram":
        return Histogram(list(self.counts), self.sum_s)


@dataclass(frozen=True)
class FiguresRead:
    """A copy of all figures at one moment. `ended`: saves and loads whose rank 0 is on this node."""

    durations: Mapping[Kind, Histogram]
    phases: Mapping[tuple[Kind, str], Histogram]
    sizes: Mapping[tuple[Kind, str], int]
    ended: Mapping[Kind, int]
    divergences: int
    bad_copies: int
    errors: Mapping[tuple[str, str], int]


class Figures:
    """Adds up what this node's ranks and its agent report. Safe for concurrent use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations: dict[Kind, Histogram] = {"save": Histogram(), "load": Histogram()}
        self._phases: dict[tuple[Kind, str], Histogram] = {}
        self._sizes, self._ended = Counter[tuple[Kind, str]](), Counter[Kind]()
        self._divergences = self._bad_copies = 0
        self._errors = Counter[tuple[str, str]]()

    def add_report(self, report: RankReport) -> None:
        """Adds one rank's part in a save or load."""
        if report.error:
            self._count(report.kind, report.error)
            return
        kind = report.kind
        with self._lock:
            self._durations[kind].add(report.seconds)
            for phase, seconds in report.phases.items():
                self._phases.setdefault((kind, phase), Histogram()).add(seconds)
            for name, size in report.sizes.items():
                self._sizes[kind, name] += size
            self._ended[kind] += report.rank == 0
            self._divergences += report.divergences
            self._bad_copies += report.bad_copies

    def count_error(self, origin: Origin, error: BaseException) -> None:
        self._count(origin, type(error).__name__)

    def _count(self, origin: Origin, name: str) -> None:
        with self._lock:
            # The names come from ranks, and each stays: their number must be bounded.
            is_known = (origin, name) in self._errors or len(self._errors) < _CLASSES_MAX
            self._errors[origin, name if is_known else _OTHER] += 1

    def read(self) -> FiguresRead:
        with self._lock:
            return FiguresRead(
                {kind: each.copy() for kind, each in self._durations.items()},
                {key: each.copy() for key, each in self._phases.items()},
                dict(self._sizes),
                {kind: self._ended[kind] for kind in self._durations},
                self._divergences,
                self._bad_copies,
                dict(self._errors),
            )
