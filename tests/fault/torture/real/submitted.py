"""Submitted saves of real ranks: when agents have finished one, and whether they had its outline."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fault.torture.real.processes import RealCluster

FINISH_S, FINISH_DISTURBED_S = 60.0, 8.0
"""So long agents get for what is left of a save, if all of them answer, and if not."""
_POLL_S = 0.05
BEFORE_OUTLINE = {"rank.handing-over", "rank.submitted", "coordinator.drawn", "coordinator.opened"}
BEFORE_OUTLINE |= {"coordinator.placed", "coordinator.accounted", "coordinator.metadata-staged"}
AFTER_OUTLINE = {"coordinator.submitted", "coordinator.decided", "coordinator.published", "agent.finishing"}
AFTER_OUTLINE |= {"agent.decided", "agent.finished", "agent.decision-staged", "commit.named", "commit.done"}


class SubmittedSaves:
    """What a schedule asks the cluster about submitted saves."""

    def __init__(self, cluster: "RealCluster") -> None:
        self._cluster = cluster
        self.outage_at: str | None = None
        """The failpoint at which the outage of the save under way waits, or has happened."""

    def expect(self) -> None:
        """Called when a submitted save begins."""

    def finish(self) -> None:
        """Waits until no reachable agent has a staged save, except those that wait for absent nodes."""
        nodes = self._cluster.nodes
        answering = [node for node in nodes if node.is_up and node.index not in self._cluster.network.cut]
        deadline = time.monotonic() + (FINISH_S if len(answering) == len(nodes) else FINISH_DISTURBED_S)
        while any(any((node.root / ".staging").glob("*")) for node in answering) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def had_outline(self) -> bool | None:
        """Whether the coordinator's agent had the outline at the time of the outage. None: that is unknown."""
        if self.outage_at in BEFORE_OUTLINE:
            return False
        return True if self.outage_at in AFTER_OUTLINE else None
