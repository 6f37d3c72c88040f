"""The simulated cluster: real stores, services and routes of several nodes in one process, with a simulated clock."""

import argparse
import contextlib
import io
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.http.greeting import Greeter
from replicated_ckpt.agent.http.object_routes import ObjectRoutes
from replicated_ckpt.agent.http.routes import Routes
from replicated_ckpt.agent.repair.reprotect import Outcome, Protection, Reprotector
from replicated_ckpt.agent.state.endpoint import Endpoint, keep_identity, next_identity
from replicated_ckpt.agent.state.rights import Tokens
from replicated_ckpt.cli.checkpoints import repair
from replicated_ckpt.core.upkeep.repair_plan import Problem, RepairPlan
from replicated_ckpt.dcp.save.agent_tasks import ObjectTier
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.pins import Pins
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.throttle import Pace
from tests.fault.torture.simulated.clocks import UNIX_S, TrueClocks
from tests.fault.torture.simulated.faults import Faults, Outage
from tests.fault.torture.simulated.network import Actor, Network
from tests.fault.torture.simulated.operations import (
    Hung,
    Operation,
    Operations,
    SimulatedLock,
    is_simulated_thread,
)
from tests.fault.torture.simulated.replacements import replacements
from tests.fault.torture.simulated.threads import Threads

LOST_AFTER_S = 30.0
AWAY_AFTER_S = 3600.0
RESUMED_MAX = 1000
_ELSEWHERE = random.SystemRandom()
_REAL_TIME = time.time


class NoPace(Pace):
    """Background work takes no time in a simulation."""

    def __init__(self) -> None:
        super().__init__(1.0, threading.Event())

    def take(self, size_bytes: int) -> None:
        del size_bytes


class Node:
    """One simulated node: its disk, and its agent while one runs. Nothing runs on a node that `is_off`."""

    def __init__(self, cluster: "Cluster", index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.root = cluster.base / f"node{index}"
        self.agent: Actor | None = None
        self._starting: Actor | None = None
        self.is_off = False
        self.is_leaving = False
        self.service: Any = None
        self.port = 9000 + index
        self.tokens = Tokens("", "")

    @property
    def is_up(self) -> bool:
        return self.agent is not None and not self.agent.is_dead

    def node_id(self) -> str:
        return str(self.service.node_id)

    def boot(self) -> None:
        """Starts the agent if none runs, as `agent.life` does."""
        if self.is_off:
            raise StoreUnavailable(f"node {self.index}", "start", "agent", "the machine is off")
        if self.is_up:
            return
        self.release_locks()
        self._starting = actor = Actor(self.index, is_agent=True)
        try:
            self._start(actor)
        finally:
            self._starting = None

    def _start(self, actor: Actor) -> None:
        with self.cluster.network.acting(actor):
            store = LocalStore(self.root)
            directory = store.agent_directory()
            self.service = NodeService(store)
            self.service.completing = SimulatedLock(self.cluster.operations)
            self.service.pins = Pins(self.cluster.now)
            self.service.recover()
            store.tidy(is_alone=True)
            identity = next_identity(directory, self.service.node_id)
            self.tokens = identity.tokens
            keep_identity(directory, identity)
            peer, owner = self.tokens.peer, self.tokens.owner
            self.endpoint = Endpoint(
                self.service.node_id, "", self.port, peer, 1, "0.1.0", identity.incarnation, "f" * 64, owner
            )
            self.greeter = Greeter(self.service.peers, self.endpoint)
            self._start_background_work(store)
            self.agent, self.is_leaving = actor, False
            self.greeter.greet_all()

    def _start_background_work(self, store: LocalStore) -> None:
        timeouts = SilenceTimeouts(LOST_AFTER_S, AWAY_AFTER_S)
        stopping, clock = threading.Event(), self.cluster.now
        targets = UploadBook(store.agent_directory())
        self.uploader = Uploader(self.service, targets, NoPace(), timeouts, stopping, self._suspect, clock)
        self.reprotector = Reprotector(
            self.service, timeouts, NoPace(), stopping, clock, self.uploader.node_report, self.greeter.greet
        )
        self.reprotector.carry_out = self._carry_out  # type: ignore[method-assign] # its thread does not run
        objects = ObjectRoutes(self.service, self.uploader)
        self.routes = Routes(self.service, self.reprotector, objects, self._status, stopping.set)

    def _status(self, *, is_brief: bool, is_opening: bool = False) -> dict[str, Any]:
        del is_brief, is_opening
        who = {
            "node_id": self.endpoint.node_id,
            "incarnation": self.endpoint.incarnation,
            "start_id": str(id(self.agent)),
        }
        return {
            **who,
            "is_leaving": self.is_leaving,
            "tls_sha256": self.endpoint.tls_sha256,
            "greeted": True,
            "object_store": self.uploader.status(),
            "in_doubt": [doubt.to_json() for doubt in self.service.in_doubt.read_all()],
        }

    def _carry_out(self, part: RepairPlan, *, may_replace: bool) -> list[Outcome]:
        order: Future[list[Outcome]] = Future()
        self.reprotector._orders.append((part, may_replace, order))
        self.reprotector._do_orders()
        return order.result()

    def _suspect(self, checkpoint_id: str, save_id: str, name: str, why: str) -> None:
        self.reprotector.suspect(checkpoint_id, save_id, name, why)

    def address(self) -> AgentAddress:
        return self.endpoint.address(f"host{self.index}")

    def leave(self) -> None:
        """The agent ends in good order, and informs the others that its disk is intact."""
        if self.agent is not None and self.is_up:
            with self.cluster.network.acting(self.agent):
                self.is_leaving = True
                self.greeter.announce_exit()
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the agent, also to one that is starting."""
        actors = [actor for actor in (self.agent, self._starting) if actor is not None]
        self.agent = None
        for actor in actors:
            self.cluster.faults.die(actor)
            self.release_locks()

    def release_locks(self) -> None:
        """Releases the agent's locks, as the kernel does when a process ends."""
        if self.service is not None:
            for save_id in list(self.service.pins._lock_by_save):
                self.service.pins._close(save_id)

    def switch_off(self) -> None:
        """The machine stops with all its processes. Its disk stays as it is."""
        self.is_off = True
        self.kill()
        for rank in [rank for rank in self.cluster.ranks if rank.node == self.index]:
            self.cluster.faults.die(rank)

    def switch_on(self) -> None:
        self.is_off = False
        self.boot()

    def wipe(self) -> None:
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)


class Cluster:
    """All nodes, their network, the running operations, and the faults that are planned at failpoints."""

    def __init__(self, base: Path, count: int, seed: int, clocks: TrueClocks | None = None) -> None:
        self.base = base
        self.random = random.Random(seed)
        self.clocks = clocks or TrueClocks()
        self._thread = threading.current_thread()
        self.operations = Operations(Actor(-1, is_agent=False))
        self.network = Network(self.operations)
        self.is_bucket_down = False
        self._clock = 1000.0
        self.nodes = [Node(self, index) for index in range(count)]
        self.network.nodes = list(self.nodes)
        self.ranks: list[Actor] = []
        """The processes of all jobs that go on."""
        self.faults = Faults(self.operations, base, self._suffer)
        self.threads = self.submitted = Threads(self, seed)

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return self._clock

    def unix_now(self, node: int | None = None) -> float:
        """The wall clock of a node. None: of the node whose process runs now."""
        return UNIX_S + self._clock + self.clocks.offset_s(self.network.actor.node if node is None else node)

    def read_wall_clock(self) -> float:
        """Replaces `time.time`. Threads outside of the simulation get the true time."""
        return self.unix_now() if self._is_ours() else _REAL_TIME()

    def wait(self, seconds: float) -> None:
        self._clock += seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs all replacements of a simulation: network, clock, random numbers and threads."""
        with ExitStack() as stack:
            for patch in replacements(self):
                stack.enter_context(patch)
            stack.enter_context(self.faults.armed())
            try:
                yield
            finally:
                self.faults.end_all()
                for node in self.nodes:
                    node.release_locks()

    def draw_uuid(self) -> uuid.UUID:
        """Replaces `uuid.uuid4`. A thread that an earlier test has left gets a true UUID."""
        return uuid.UUID(int=(self.random if self._is_ours() else _ELSEWHERE).getrandbits(128), version=4)

    def _is_ours(self) -> bool:
        return threading.current_thread() is self._thread or is_simulated_thread()

    # Faults at failpoints ----------------------------------------------------------------------------------------

    def plan_kill(self, name: str, node: int, *, is_agent: bool) -> None:
        """The next such process on this node that reaches the failpoint is killed there."""
        self.faults.plan_kill(name, node, is_agent=is_agent)

    def plan_error(self, name: str, node: int, *, is_agent: bool, error: int) -> None:
        """The next such process that reaches the failpoint gets this error number from the system."""
        self.faults.plan_error(name, node, is_agent=is_agent, error=error)

    def plan_outage(self, name: str, node: int, *, is_agent: bool, outage: Outage) -> None:
        """When such a process reaches the failpoint, `outage` happens to several nodes at once."""
        self.faults.plan_outage(name, node, is_agent=is_agent, outage=outage)

    def _suffer(self, outage: Outage) -> None:
        if outage.how == "cut":
            self.network.split(outage.nodes)
            return
        if outage.how in ("trainers", "trainers and agents"):
            for rank in list(self.ranks):
                self.faults.die(rank, is_undone=False)
                rank.release()
        for index in self._in_order_of_death(outage.nodes) if outage.how != "trainers" else ():
            if outage.how == "off":
                self.nodes[index].switch_off()
            else:
                self.nodes[index].kill()

    def _in_order_of_death(self, nodes: Iterable[int]) -> list[int]:
        """The nodes in the order in which they stop. The running one is first: once it is dead, others may take its
        locks.
        """
        now = self.operations.running.actors[-1].node
        return sorted(nodes, key=lambda index: (index != now, index))

    def settle_kill(self) -> Actor | None:
        """The process that was killed at a failpoint, or None. Afterwards no fault is planned."""
        return self.faults.settle()

    def begin(self, name: str, work: Callable[[], Any], point: str) -> Operation:
        """Runs an operation until it ends, or pauses where it first reaches this failpoint."""
        return self.operations.start(name, work, lambda reached, _: reached == point)

    def resume(self, operation: Operation) -> None:
        """Runs a paused operation to its end."""
        for _ in range(RESUMED_MAX):
            if operation.is_over:
                return
            self.operations.resume(operation)
        raise Hung(f"{operation.name} waits for ever")

    # Background work ---------------------------------------------------------------------------------------------

    def protect(self, rounds: int = 12) -> list[Protection]:
        """Lets every running agent read all of its data, and do rounds until all report that they are done. Returns the
        last reports.
        """
        self.wait(LOST_AFTER_S + 70)
        for node in (node for node in self.nodes if node.is_up):
            for finding in Inspector(node.service.store, node.node_id()).inspect():
                if finding.problem is Problem.CORRUPT:
                    node.reprotector.suspect_finding(finding)
        said: list[Protection] = []
        for _ in range(rounds):
            said = self.round_of(self.nodes)
            if all(found.is_complete for found in said):
                break
            self.wait(LOST_AFTER_S + 5)
        return said

    def repair(self, node: int, lost: Sequence[str] = ()) -> str:
        """Runs `replicated-ckpt repair` on a node. Returns its exit code, or how it ended."""
        root = str(self.nodes[node].root)
        arguments = argparse.Namespace(root=root, id=None, dry_run=False, lost=list(lost), copies=2, json=True)
        with self.network.acting(Actor(node, is_agent=False)), contextlib.redirect_stdout(io.StringIO()):
            try:
                return str(int(repair.run(arguments)))
            except ReplicatedCkptError as exc:
                return repr(exc)

    def name_bucket(self, url: str) -> None:
        """Names the bucket to all agents, as ranks of the next job do. An agent with an empty store that has had no
        save does not know it.
        """
        for node in self.nodes:
            with self.network.acting(Actor(node.index, is_agent=False)):
                problems = ObjectTier(LocalStore(node.root), ObjectTarget.check_supported(url, None), 1).submit()
            assert not problems, problems

    def pass_time(self, seconds: float) -> None:
        """Lets the agents work in the background for this long."""
        until = self.now() + seconds
        while self.now() < until:
            self.wait(min(15.0, until - self.now()))
            self.round_of(self.nodes)

    def background(self) -> None:
        """Runs what the agents' threads do soon after they are woken."""
        for node in self.nodes:
            if node.is_up and node.reprotector._woken.is_set():
                node.reprotector._woken.clear()
                self._round(node)

    def round_of(self, nodes: Collection[Node]) -> list[Protection]:
        """Runs one round of each of these agents that runs."""
        return [self._round(node) for node in nodes if node.is_up]

    def _round(self, node: Node) -> Protection:
        assert node.agent is not None
        with self.network.acting(node.agent):
            try:
                node.uploader.round()
                node.reprotector.last = node.reprotector.round()
            except (ReplicatedCkptError, OSError) as exc:
                node.reprotector.last = Protection(is_complete=False, failed=(str(exc),))
        return node.reprotector.last
