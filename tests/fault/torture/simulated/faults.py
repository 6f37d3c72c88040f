"""Faults of a simulation: which process is killed where. A killed process changes nothing more on its disk."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt import failpoints
from tests.fault.torture.simulated.network import Actor, Killed
from tests.fault.torture.simulated.operations import Operation, Operations


@dataclass(frozen=True)
class Outage:
    """A fault of several nodes at once. "agents": their agents are killed. "off": the machines stop. "cut": a partition
    separates them from the others.

    "trainers": all ranks are killed, on every node. "trainers and agents": the agents of these nodes are killed, too.
    """

    nodes: frozenset[int]
    how: str


@dataclass(frozen=True)
class _Plan:
    """A fault that is planned at a failpoint for such a process on this node. Without outage and error, the process is
    killed.
    """

    point: str
    node: int
    is_agent: bool
    outage: Outage | None = None
    error: int = 0


class Faults:
    """At most one fault is planned at a time. `suffer` carries out an outage."""

    def __init__(self, operations: Operations, base: Path, suffer: Callable[[Outage], None]) -> None:
        self._operations = operations
        self._base = base
        self._suffer = suffer
        self._plan: _Plan | None = None
        self._killed: Actor | None = None
        self._snapshots = 0
        self.reached: set[str] = set()
        """Failpoints that processes have come to, by name."""

    @contextmanager
    def armed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in failpoints.POINTS:
                stack.enter_context(failpoints.arm(name, self._reach))
            yield

    def plan_kill(self, name: str, node: int, *, is_agent: bool) -> None:
        self._plan, self._killed = _Plan(name, node, is_agent), None

    def plan_error(self, name: str, node: int, *, is_agent: bool, error: int) -> None:
        self._plan, self._killed = _Plan(name, node, is_agent, error=error), None

    def plan_outage(self, name: str, node: int, *, is_agent: bool, outage: Outage) -> None:
        self._plan, self._killed = _Plan(name, node, is_agent, outage), None

    def settle(self) -> Actor | None:
        """The process that was killed at a failpoint, or None. Afterwards no fault is planned."""
        killed, self._plan, self._killed = self._killed, None, None
        return killed

    def _reach(self, name: str) -> None:
        actor = self._operations.running.actors[-1]
        if not actor.is_dead:
            self.reached.add(name)
            self._fire(name, actor)
            if not actor.is_dead:
                self._operations.reach(name)
        if actor.is_dead:
            raise Killed(name)

    def _fire(self, name: str, actor: Actor) -> None:
        plan = self._plan
        if plan is None or (plan.point, plan.node, plan.is_agent) != (name, actor.node, actor.is_agent):
            return
        self._plan, self._killed = None, actor
        if plan.error:
            raise OSError(plan.error, os.strerror(plan.error), name)
        if plan.outage is None:
            self.die(actor)
        else:
            self._suffer(plan.outage)

    # Dying -------------------------------------------------------------------------------------------------------

    def die(self, actor: Actor, *, is_undone: bool = True) -> None:
        """SIGKILL. The process's calls are unwound at once, without an effect on its disk.

        `is_undone`: this also holds while the process waits for another one, which must not change that disk any more.
        """
        if actor.is_dead:
            return
        actor.is_dead = True
        operations = self._operations
        for operation in [paused for paused in operations.paused if _ends_with(actor, paused)]:
            if operation in operations.paused:
                actor.undo = self.take_snapshot(actor.node)
                operations.resume(operation)
        if actor in operations.running.actors if is_undone else actor is operations.running.actors[-1]:
            actor.undo = self.take_snapshot(actor.node)

    def take_snapshot(self, node: int) -> Callable[[], None]:
        root = self._base / f"node{node}"
        self._snapshots += 1
        snapshot = root.with_suffix(f".snapshot{self._snapshots}")
        shutil.copytree(root, snapshot, symlinks=True, copy_function=_same_file)

        def undo() -> None:
            shutil.rmtree(root)
            snapshot.rename(root)

        return undo

    def end_all(self) -> None:
        """Ends the simulation: kills everything that is paused."""
        self._plan = None
        for operation in list(self._operations.paused):
            for actor in operation.actors:
                actor.is_dead = True
            if operation in self._operations.paused:
                self._operations.resume(operation)


def _ends_with(actor: Actor, paused: Operation) -> bool:
    """Whether the paused operation is unwound when the process dies: threads of the process, but only those that are
    where it waits, and not those that it has called.
    """
    return actor is paused.actors[-1] if paused.is_thread else actor in paused.actors


def _same_file(source: str, target: str) -> None:
    os.link(source, target, follow_symlinks=False)
