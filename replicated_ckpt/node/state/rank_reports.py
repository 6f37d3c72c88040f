"""The reports that this node's ranks keep of their last saves and loads, for `replicated-ckpt report`."""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from replicated_ckpt.core.rank_report import RankReport
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

KEPT = 16
"""Saves, and as many loads. At a thousand ranks the files of rank 0's node take about 1 MB each."""
_FILE_BYTES_MAX = 64 << 20
_PREFIX, _SUFFIX = "report-", ".json"


class RankReports:
    """Files in ROOT/.agent: `report-<save or load>-<id>-<rank>.json`.

    Ranks write their own files, so that a report needs no agent. Any number of ranks may do so at once.
    """

    def __init__(self, store: LocalStore) -> None:
        self._root, self._path = store.root, store.root_agent_directory()

    def keep(self, report: RankReport) -> None:
        """Writes a report, and removes those of the oldest saves or loads. A power loss may take it.

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
