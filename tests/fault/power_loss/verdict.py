"""The verdict on many states: each is built, restarted on and judged, and the first findings are told with their state."""

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
    """Judges states below `directory`; an equal state with equal promises is judged once in its life."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[object] = set()
        self.judged = 0

    def findings(self, states: Iterable[CrashState]) -> list[str]:
        """What is wrong in the first states in which anything is."""
        found: list[str] = []
        logging.disable(logging.CRITICAL)  # saves are given up by the thousand
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
