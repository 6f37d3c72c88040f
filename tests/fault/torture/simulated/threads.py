"""Threads of a simulation: operations that have not begun. One runs when another waits for it, or when all get time."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.dcp.save import save_attempt, shard_writer, submission
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves import finish, settle, submissions
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.tee import Buffers
from tests.fault.torture.simulated.network import Actor, Killed
from tests.fault.torture.simulated.operations import Hung

if TYPE_CHECKING:
    from tests.fault.torture.simulated.cluster import Cluster, Node

BEGUN = "thread.begun"
TURNS_MAX = 20_000
"""After this many turns without an end, each thread waits for another one."""


class Threads:
    """The threads of all simulated processes. Their order is a function of the seed."""

    def __init__(self, cluster: "Cluster", seed: int) -> None:
        self._cluster = cluster
        self._operations = cluster.operations
        self._random = Random(f"threads {seed}")
        self.acting = cluster.network.acting
        self._turns = 0
        self.submitted: list[SubmittedInTurn] = []

    def start(self, work: Callable[..., object], *arguments: Any, name: str) -> None:
        """Replaces `start_worker`: adds a thread of the running process."""
        actor, view = self._cluster.network.actor, self._operations.running.rank

        def run() -> None:
            self._operations.running.rank = view
            with self._cluster.network.acting(actor):
                self._operations.reach(BEGUN)
                work(*arguments)

        self._operations.start(name, run, lambda point, _: point == BEGUN, is_thread=True)

    def yield_now(self) -> None:
        """The running thread waits while others run. If its process was killed, the thread ends here."""
        self._check_alive()
        running = self._operations.running
        running.pauses_at = lambda point, _: point == BEGUN
        self._operations.reach(BEGUN)
        self._check_alive()

    def _check_alive(self) -> None:
        actor = self._cluster.network.actor
        if actor.is_dead:  # Its changes to the disk while it unwinds are undone.
            actor.undo = actor.undo or self._cluster.faults.take_snapshot(actor.node)
            raise Killed("it was killed while it waited")

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Runs other threads until the condition holds. A process that was killed meanwhile stops waiting."""
        while not is_so():
            self._wait(what)

    def _wait(self, what: str) -> None:
        """A thread yields to the others. A caller that is not a thread runs one of them."""
        if self._operations.running.is_thread:
            self.yield_now()
        elif not self.run_one():
            raise Hung(f"{self._operations.running.name} waits for {what}, which no thread brings")
        self._check_alive()

    def run_one(self) -> bool:
        """Runs one thread until it ends or waits again. Returns whether there was one."""
        ready = [operation for operation in self._operations.paused if operation.is_thread]
        self._turns += 1
        if self._turns > TURNS_MAX:
            raise Hung(f"{[operation.name for operation in ready]} wait for each other")
        if ready:
            operation = self._random.choice(ready)
            self._operations.resume(operation)
            if operation.is_over:
                self._turns = 0
                if operation.error is not None and not isinstance(operation.error, Killed):
                    raise operation.error
        return bool(ready)

    def sleep(self, seconds: float) -> None:
        """Replaces `time.sleep`."""
        self._cluster.wait(seconds)
        if any(operation.is_thread for operation in (*self._operations.paused, self._operations.running)):
            self._wait("time to pass")

    def _sleep_as_orphan(self, seconds: float) -> None:
        """Sleeps longer if nothing else runs: one turn of other threads must not use up a time-out of a second."""
        is_alone = not any(operation.is_thread for operation in self._operations.paused)
        self.sleep(20.0 if is_alone else seconds)

    def expect(self) -> None:
        """Called when a submitted save begins."""
        self._cluster.faults.reached.clear()

    def finish(self) -> None:
        """Lets agents and living ranks finish all submitted saves."""
        self.run_all()

    def had_outline(self) -> bool:
        """Whether the coordinator's agent has received the outline of the last submitted save."""
        return "coordinator.submitted" in self._cluster.faults.reached

    def run_all(self) -> None:
        """Gives every thread time to end, and every agent time to settle the saves of its ranks, in random order."""
        while True:
            steps: list[Callable[[], object]] = [
                self.run_one for operation in self._operations.paused if operation.is_thread
            ]
            steps += [submitted.follow for submitted in self.submitted if submitted.is_orphan]
            if not steps:
                break
            self._random.choice(steps)()
        self.submitted = [submitted for submitted in self.submitted if not submitted.is_over]

    def submit(
        self, store: LocalStore, shard: SubmittedShard, descriptors: Sequence[int], memory: memoryview | None = None
    ) -> "SubmittedInTurn":
        """Replaces `submit`: the agent's Unix socket."""
        del memory
        node = next(node for node in self._cluster.nodes if node.root == store.root)
        if node.agent is None or not node.is_up:
            raise StoreUnavailable("this node's agent", "submit", "the shard", "it does not run")
        copy = SubmittedShard.from_json(json.loads(json.dumps(shard.to_json())), len(descriptors))
        rank = self._cluster.network.actor
        with self._cluster.network.acting(node.agent):
            node.service.check_open(shard.copies.save_id)
            future = node.service.submissions.take_shard(copy, [os.dup(fd) for fd in descriptors])
        submitted = SubmittedInTurn(self, node, rank, shard.copies.save_id, future)
        self.submitted.append(submitted)
        if self._random.random() < 0.5:
            self.run_one()
        return submitted

    def replacements(self) -> Iterator[tuple[object, str, object]]:
        """The replacements for threads, and for waiting for them, in the modules that submit saves."""
        clock = SimpleNamespace(monotonic=self._cluster.now, sleep=self.sleep)
        for module in (finish, submissions, submission):
            yield module, "start_worker", self.start
            yield module, "Future", partial(FutureInTurn, self)
        for module in (finish, submission, submission):
            yield module, "time", clock
        yield settle, "time", SimpleNamespace(monotonic=self._cluster.now, sleep=self._sleep_as_orphan)
        yield submissions, "Buffers", partial(Buffers, 4, 1 << 16)
        yield save_attempt, "wait", self._wait_for_all
        yield submission, "submit", self.submit
        yield shard_writer, "submit", self.submit
        yield submission, "read_endpoint", self._read_endpoint

    def _wait_for_all(self, ends: Sequence["Future[Any]"], timeout_s: float | None = None) -> SimpleNamespace:
        """Replaces `concurrent.futures.wait`."""
        until = self._cluster.now() + (1e9 if timeout_s is None else timeout_s)
        while not all(end.done() for end in ends) and self._cluster.now() < until:
            self.sleep(0.0 if timeout_s is None else timeout_s / 10)
        return SimpleNamespace(done=[end for end in ends if end.done()])

    def _read_endpoint(self, directory: Path) -> Endpoint | None:
        node = next(node for node in self._cluster.nodes if node.root in directory.parents)
        return node.endpoint if node.is_up else None


class FutureInTurn(Future[Any]):
    """A future whose `result` runs other threads until it is done."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> Any:
        self._threads.wait_until(self.done, "an end")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._threads.wait_until(self.done, "an end")
        return super().exception(timeout)


class SubmittedInTurn:
    """A shard that an agent has accepted. Replaces `Submission`, and the thread of the Unix socket."""

    def __init__(self, threads: Threads, node: "Node", rank: Actor, save_id: str, end: "Future[WrittenCopies]") -> None:
        self._threads, self._node, self._rank, self._save_id, self._end = threads, node, rank, save_id, end
        self._agent = node.agent
        self._is_closed = self._is_followed = False

    def wait(self) -> WrittenCopies:
        self._threads.wait_until(lambda: self._end.done() or self._is_agent_dead, "a shard")
        if self._is_agent_dead:
            raise StoreUnavailable("this node's agent", "submit", "the shard", "it was killed")
        found: WrittenCopies = self._end.result()
        return WrittenCopies.from_json(json.loads(json.dumps(found.to_json())))

    def detach(self, memory: memoryview) -> None:
        del memory
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True

    @property
    def _is_agent_dead(self) -> bool:
        return self._agent is None or self._agent.is_dead

    @property
    def is_over(self) -> bool:
        return self._is_followed or self._is_agent_dead

    @property
    def is_orphan(self) -> bool:
        """Whether the rank is dead, so that the agent must settle the save now."""
        is_left = self._is_closed or self._rank.is_dead
        return (
            is_left and not self.is_over and self._end.done() and not self._node.service.store.is_locked(self._save_id)
        )

    def follow(self) -> None:
        self._is_followed = True
        assert self._agent is not None
        with contextlib.suppress(Killed), self._threads.acting(self._agent):
            settle.follow_stale_save(self._node.service, self._save_id)
