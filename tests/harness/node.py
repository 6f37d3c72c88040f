"""A simulated node: a store directory, the agent that serves it, and what its processes are started with."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.processes import agent_of, end, is_running


@dataclass
class Node:
    """Its ranks see its store at `root`; it lies at `disk` (the same, but for private mounts).

    `environment` is for its ranks and for the agents that they start. With `netns` (of ip-netns(8)) its processes are
    in that network, where other nodes find it at `address`. `own`: what it alone sees at other paths, a /tmp say.
    """

    root: Path
    disk: Path
    environment: dict[str, str] = field(default_factory=dict)
    netns: str | None = None
    address: str = "127.0.0.1"
    own: dict[str, Path] = field(default_factory=dict)
    hostname: str | None = None

    def mounts(self) -> list[tuple[str, str]]:
        """What its processes alone see, and where: its disk at its root first."""
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
        """The node is gone: its agent and every byte of its store."""
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
        """Ids of the committed checkpoints, of one part each."""
        return {path.parent.name for path in self.disk.glob("*/.manifest.json") if not path.parent.name.startswith(".")}


def _names_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []
