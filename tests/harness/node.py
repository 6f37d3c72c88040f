"""A simulated node: a store directory, its agent, and the environment of its processes."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.processes import agent_of, end, is_running


@dataclass
class Node:
    """Its ranks see its store at `root`. The store lies at `disk`, which is the same path without private mounts.

    `environment`: of its ranks, and of the agents that they start. `netns`: the network namespace (ip-netns(8)) of its
    processes, in which other nodes reach it at `address`. `own`: other paths that only this node sees, for example its
    /tmp.
    """

    root: Path
    disk: Path
    environment: dict[str, str] = field(default_factory=dict)
    netns: str | None = None
    address: str = "127.0.0.1"
    own: dict[str, Path] = field(default_factory=dict)
    hostname: str | None = None

    def mounts(self) -> list[tuple[str, str]]:
        """The mounts that only its processes see. The first is its disk at its root."""
        pairs = [] if self.root == self.disk else [(str(self.disk), str(self.root))]
        return [*pairs, *((str(source), target) for target, source in self.own.items())]

    def agent_pid(self) -> int | None:
        try:
            pid = agent_of(self.disk)
        except (OSError, ValueError, KeyError):
            return None
        return pid if is_running(pid) else None

    def kill_agent(self) -> None:
        if pid := self.agent_pid():
            end([pid])

    def lose(self) -> None:
        """Loses the node: kills its agent, and deletes its store."""
        self.kill_agent()
        shutil.rmtree(self.disk, ignore_errors=True)
        self.disk.mkdir(parents=True)

    def staging(self) -> list[str]:
        return _names_under(self.disk / ".staging")

    def trash(self) -> list[str]:
        return _names_under(self.disk / ".trash")

    def files(self, checkpoint_id: str) -> set[str]:
        return {path.name for path in (self.disk / checkpoint_id).iterdir()}

    def checkpoints(self) -> set[str]:
        """Ids of the committed checkpoints whose id has one part."""
        return {path.parent.name for path in self.disk.glob("*/.manifest.json") if not path.parent.name.startswith(".")}


def _names_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []
