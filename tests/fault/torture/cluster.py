"""The simulated cluster: real stores, services and routes of several nodes in one process, with a clock of its own."""

import os
import random
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from replicated_ckpt import failpoints
from replicated_ckpt.agent import reprotect, service
from replicated_ckpt.agent.endpoint import Endpoint, keep_identity, next_identity
from replicated_ckpt.agent.greeting import Greeter
from replicated_ckpt.agent.pace import Pace
from replicated_ckpt.agent.reprotect import Protection, Reprotector
from replicated_ckpt.agent.rights import Tokens
from replicated_ckpt.agent.routes import Routes
from replicated_ckpt.agent.service import NodeService
from replicated_ckpt.agent.watch import Patience
from replicated_ckpt.core.checksum import BlockHasher
from replicated_ckpt.core.finding import Problem
from replicated_ckpt.dcp import shard_writer
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores import agent_client, fanout, tee, verified
from replicated_ckpt.stores.agent_client import AgentAddress
from replicated_ckpt.stores.inspection import Inspector
from replicated_ckpt.stores.local import LocalStore
from tests.agent.agents import object_routes
from tests.fault.torture.network import Actor, Killed, Network

BLOCK_BYTES = 512
LOST_AFTER_S = 30.0


class NoPace(Pace):
    """Background work takes no time in a simulation."""

    def __init__(self) -> None:
        super().__init__(1.0, threading.Event())

    def take(self, size_bytes: int) -> None:
        del size_bytes


class Node:
    """One simulated node: its disk, and its agent while one runs."""

    def __init__(self, cluster: "Cluster", index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.root = cluster.base / f"node{index}"
        self.agent: Actor | None = None
        self.port = 9000 + index
        self.tokens = Tokens("", "")

    @property
    def is_up(self) -> bool:
        return self.agent is not None and not self.agent.is_dead

    def node_id(self) -> str:
        return self.service.node_id

    def boot(self) -> None:
        """Starts the agent, if none runs, as `agent.life` does."""
        if self.is_up:
            return
        actor = Actor(self.index, is_agent=True)
        with self.cluster.network.acting(actor):
            store = LocalStore(self.root)
            directory = store.agent_directory()
            self.service = NodeService(store)
            self.service.recover()
            identity = next_identity(directory)
            self.tokens = identity.tokens
            keep_identity(directory, identity)
            peer, owner = self.tokens.peer, self.tokens.owner
            self.endpoint = Endpoint(
                self.service.node_id, "", self.port, peer, 1, "0.1.0", identity.incarnation, owner_token=owner
            )
            greeter = Greeter(self.service, self.endpoint)
            patience = Patience(lost_after_s=LOST_AFTER_S)
            stopping = threading.Event()
            self.reprotector = Reprotector(
                self.service, patience, NoPace(), stopping, self.cluster.now, on_seen=greeter.greet
            )
            self.routes = Routes(
                self.service, self.reprotector, object_routes(self.service, stopping), dict, stopping.set
            )
            self.agent = actor
            greeter.greet_all()

    def address(self) -> AgentAddress:
        return self.endpoint.address(f"host{self.index}")

    def kill(self) -> None:
        if self.agent is not None:
            self.agent.is_dead = True
        self.agent = None

    def wipe(self) -> None:
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)


class Cluster:
    """All nodes, the network between them, and the faults that wait at failpoints."""

    def __init__(self, base: Path, count: int, seed: int) -> None:
        self.base = base
        self.random = random.Random(seed)
        self.network = Network()
        self._clock = 1000.0
        self._kill_at: dict[str, tuple[int, bool]] = {}
        self.killed: Actor | None = None
        self._snapshot: Path | None = None
        self.nodes = [Node(self, index) for index in range(count)]
        self.network.nodes = list(self.nodes)
        self.network.after_kill = self._undo_unwinding

    def now(self) -> float:
        return self._clock

    def wait(self, seconds: float) -> None:
        self._clock += seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Everything that a simulation replaces: the network, the clock, chance, and threads."""
        clock = SimpleNamespace(monotonic=self.now, sleep=self.wait)
        with ExitStack() as stack:
            for patch in (
                mock.patch.object(agent_client, "opened_connection", self.network.connection),
                mock.patch.object(agent_client, "given_up_after", _no_deadline),
                mock.patch.object(service, "time", clock),
                mock.patch.object(reprotect, "time", clock),
                mock.patch.object(uuid, "uuid4", self._uuid4),
                mock.patch.object(fanout.FanOut, "run", _run_inline),
                mock.patch.object(tee._SinkThread, "start"),
                mock.patch.object(tee._SinkThread, "join", tee._SinkThread.run),
                mock.patch.object(tee, "BlockHasher", partial(BlockHasher, BLOCK_BYTES)),
                mock.patch.object(shard_writer, "Buffers", partial(tee.Buffers, 4, 1 << 16)),
                mock.patch.object(os, "fsync"),  # nothing loses power here
                mock.patch.object(verified, "SCRATCH_BYTES", 1 << 16),
            ):
                stack.enter_context(patch)
            for name in failpoints.POINTS:
                stack.enter_context(failpoints.armed(name, self._reached))
            yield

    def _uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    # Kills at failpoints -----------------------------------------------------------------------------------------

    def plan_kill(self, name: str, node: int, *, is_agent: bool) -> None:
        """The next process of this kind on this node that reaches the failpoint is killed there."""
        self._kill_at = {name: (node, is_agent)}
        self.killed = None

    def _reached(self, name: str) -> None:
        actor = self.network.actor
        if actor.is_dead:
            raise Killed(name)
        if self._kill_at.get(name) != (actor.node, actor.is_agent):
            return
        self._kill_at = {}
        self.killed = actor
        actor.is_dead = True
        root = self.nodes[actor.node].root
        self._snapshot = root.with_suffix(".snapshot")
        shutil.copytree(root, self._snapshot, symlinks=True, copy_function=_same_file)
        raise Killed(name)

    def settle_kill(self) -> Actor | None:
        """Who was killed, if anybody; the rest of the job goes with a rank that was."""
        self._undo_unwinding()
        actor, self._kill_at, self.killed = self.killed, {}, None
        return actor

    def _undo_unwinding(self) -> None:
        """Undoes what the killed process did to its disk while it was unwound, before anybody else writes there."""
        if self.killed is None or self._snapshot is None:
            return
        node = self.nodes[self.killed.node]
        shutil.rmtree(node.root)
        self._snapshot.rename(node.root)
        self._snapshot = None
        if self.killed.is_agent:
            node.agent = None

    # Re-protection -----------------------------------------------------------------------------------------------

    def protect(self, rounds: int = 12) -> list[Protection]:
        """Lets every running agent read all it has and do rounds until all say that they are done; what each said last."""
        self.wait(LOST_AFTER_S + 70)
        for node in (node for node in self.nodes if node.is_up):
            for finding in Inspector(node.service.store, node.node_id()).inspected():
                if finding.problem is Problem.CORRUPT:
                    node.reprotector.suspect_finding(finding)
        said: list[Protection] = []
        for _ in range(rounds):
            said = [self._round(node) for node in self.nodes if node.is_up]
            if all(found.is_complete for found in said):
                break
            self.wait(LOST_AFTER_S + 5)
        return said

    def background(self) -> None:
        """What the agents' threads do soon after they were woken."""
        for node in self.nodes:
            if node.is_up and node.reprotector._woken.is_set():
                node.reprotector._woken.clear()
                self._round(node)

    def _round(self, node: Node) -> Protection:
        assert node.agent is not None
        with self.network.acting(node.agent):
            try:
                return node.reprotector.round()
            except ReplicatedCkptError as exc:
                return Protection(is_complete=False, failed=(str(exc),))


def _same_file(source: str, target: str) -> None:
    os.link(source, target, follow_symlinks=False)


@contextmanager
def _no_deadline(*_: Any) -> Iterator[None]:
    yield


def _run_inline(self: fanout.FanOut[Any, Any], keys: Any, call: Callable[[Any], Any]) -> fanout.FanOut[Any, Any]:
    for key in keys:
        try:
            self.results[key] = call(key)
        except ReplicatedCkptError as exc:
            self.errors[key] = exc
    return self
