"""Builds each state, restarts a node on it and judges it. Reports the first findings with their state."""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from replicated_ckpt.errors import ReplicatedCkptError
from tests.fault.power_loss.operations import build
from tests.fault.power_loss.replay import CrashState
from tests.fault.power_loss.restart import problems
from tests.fault.power_loss.scenarios import STORE

_TOLD_MAX = 5


class Judge:
    """Judges states below `directory`. States that are equal, with equal promises, are judged only once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[object] = set()
        self.judged = 0

    def findings(self, states: Iterable[CrashState]) -> list[str]:
        """The problems of the first bad states."""
        found: list[str] = []
        logging.disable(logging.CRITICAL)  # thousands of saves are aborted
        try:
            for state in states:
                found += [f"{state}: {problem}" for problem in self._judged(state)]
                if len(found) >= _TOLD_MAX:
                    break
        finally:
            logging.disable(logging.NOTSET)
        return found

    def _judged(self, state: CrashState) -> list[str]:
        if state.key in self._seen:
            return []
        self._seen.add(state.key)
        self.judged += 1
        base = self._directory / f"state{self.judged}"
        build(state.tree, base)
        try:
            return problems(base / STORE, state.promises)
        except (ReplicatedCkptError, OSError) as exc:
            return [f"{type(exc).__name__}: {exc}"]
        finally:
            shutil.rmtree(base)
