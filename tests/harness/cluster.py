"""Simulated nodes on this machine: each has a store directory and process trees that the harness watches and always
ends.
"""

import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.harness.forked import Forked
from tests.harness.launch import (
    Attempt,
    ByRank,
    Call,
    Digests,
    Launch,
    Launcher,
    Results,
    T,
    base_environment,
    call,
    tail,
)
from tests.harness.node import Node
from tests.harness.processes import end, is_running, processes_of, signal_if_running, wait_until_gone
from tests.harness.zygote import the_light_zygote

__all__ = ["Attempt", "ByRank", "Call", "Cluster", "Digests", "Launcher", "Node", "Results", "call"]

AGENT_START_S = 60.0
AGENT_STOP_S = 30.0


@dataclass
class Cluster:
    """Nodes under `base`, a directory of this cluster alone. `close` ends every process that was ever started here.

    With `quick_exit`, ranks skip the shutdown of the interpreter, which takes as long as a small save.
    """

    base: Path
    node_count: int
    private_mounts: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    quick_exit: bool = False

    def __post_init__(self) -> None:
        self.marker = f"replicated-ckpt-test-{uuid.uuid4().hex}"
        self._launches = 0
        self._agent_by_node: dict[int, Forked] = {}
        (self.base / "tmp").mkdir(parents=True)
        same_root = self.base / "nvme"
        disks = [self.base / f"node{index}" for index in range(self.node_count)]
        for folder in [same_root, *disks]:
            folder.mkdir()
        self.nodes = [Node(same_root if self.private_mounts else disk, disk) for disk in disks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(
        self,
        calls: Sequence[Call[Any]],
        *,
        nodes: Sequence[int],
        ranks: int | Sequence[int] = 1,
        launcher: Launcher = "direct",
        timeout_s: float = 90.0,
    ) -> Results:
        """Runs the calls in order on every rank of a new world, and waits for its end.

        `nodes`: in the order of their ranks, with `ranks` on each. A failing rank or the time-out fails the test with
        the output and tracebacks. After a hang, also with the stacks of all threads of all ranks.
        """
        with self._launched(calls, nodes, ranks, launcher) as (launch, world_size):
            launch.wait(timeout_s)
            return launch.results(calls, world_size)

    def run(
        self,
        step: Call[T],
        *,
        nodes: Sequence[int],
        ranks: int | Sequence[int] = 1,
        launcher: Launcher = "direct",
        timeout_s: float = 90.0,
    ) -> ByRank[T]:
        """Like `launch` with one call. Returns its result by rank."""
        return self.launch([step], nodes=nodes, ranks=ranks, launcher=launcher, timeout_s=timeout_s).of(step)

    def attempt(
        self,
        calls: Sequence[Call[Any]],
        *,
        nodes: Sequence[int],
        ranks: int | Sequence[int] = 1,
        timeout_s: float = 90.0,
        grace_s: float = 2.0,
        awaited: Sequence[int] | None = None,
    ) -> Attempt:
        """Like `launch`, but ranks may fail or die. Returns the outcome of each.

        The other ranks are ended `grace_s` after the first failure, or as soon as the `awaited` ranks have ended. A
        hang without a failure fails the test.
        """
        with self._launched(calls, nodes, ranks, "direct") as (launch, _):
            return launch.attempt(calls, timeout_s, grace_s, awaited)

    @contextmanager
    def _launched(
        self, calls: Sequence[Call[Any]], nodes: Sequence[int], ranks: int | Sequence[int], launcher: Launcher
    ) -> Iterator[tuple[Launch, int]]:
        counts = [ranks] * len(nodes) if isinstance(ranks, int) else list(ranks)
        self._launches += 1
        folder = self.base / f"launch{self._launches}"
        folder.mkdir()
        spec = {"calls": [each.as_json() for each in calls], "roots": [str(node.root) for node in self.nodes]}
        (folder / "spec.json").write_text(json.dumps({**spec, "quick_exit": self.quick_exit}))
        launch = Launch(self.nodes, folder, f"{self.marker}-{folder.name}", self._environment())
        try:
            launch.start(nodes, counts, launcher)
            yield launch, sum(counts)
        finally:
            launch.end_ranks()

    def _environment(self) -> dict[str, str]:
        return {**base_environment(), "TMPDIR": str(self.base / "tmp"), **self.environment}

    def start_agents(self, environment_by_node: Mapping[int, Mapping[str, str]], *, idle_exit_s: float = 60.0) -> None:
        """Starts agents of some nodes before any rank does, each with its own environment.

        They serve when this returns. Ranks of later launches find them.
        """
        for index, environment in environment_by_node.items():
            self._agent_by_node[index] = self._started_agent(index, environment, idle_exit_s)
        deadline = time.monotonic() + AGENT_START_S
        for index in environment_by_node:
            process, node = self._agent_by_node[index], self.nodes[index]
            while node.agent_pid() != process.pid:
                log = tail(self.base / f"agent{index}.log")
                assert process.poll() is None, f"the agent ended with {process.returncode}: {log}"
                assert time.monotonic() < deadline, f"the agent did not start: {log}"
                time.sleep(0.01)

    def _started_agent(self, index: int, environment: Mapping[str, str], idle_exit_s: float) -> Forked:
        node = self.nodes[index]
        arguments = ["--root", str(node.root), "--host", node.address, "--idle-exit-s", str(idle_exit_s)]
        own = {"REPLICATED_CKPT_TEST_LAUNCH": self.marker, **node.environment, **environment}
        with (self.base / f"agent{index}.log").open("ab") as log:
            return Forked(
                the_light_zygote().path,
                "agent",
                arguments,
                command=[sys.executable, "-m", "replicated_ckpt.agent"],
                environment={**self._environment(), **own},
                output=log.fileno(),
                cwd=str(self.base),
                mounts=node.mounts(),
                hostname=node.hostname,
                netns=node.netns,
            )

    def agent_code(self, index: int, timeout_s: float = 15.0) -> int | None:
        """The exit code of an agent that `start_agents` started. None: it still runs after `timeout_s`."""
        try:
            return self._agent_by_node[index].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop_agents(self) -> None:
        """Sends SIGTERM to every agent. All must end."""
        pids = [pid for node in self.nodes if (pid := node.agent_pid())]
        for pid in pids:
            signal_if_running(pid, signal.SIGTERM)
        stubborn = wait_until_gone(pids, AGENT_STOP_S)
        for pid in stubborn:
            signal_if_running(pid, signal.SIGUSR1)
        if stubborn:
            time.sleep(1.0)  # for the stacks
        logs = self._logs() if stubborn else ""
        end(stubborn)
        assert not stubborn, f"agents {stubborn} ignored SIGTERM for {AGENT_STOP_S} s\n{logs}"

    def _logs(self) -> str:
        """The logs of all agents, whether ranks or `start_agents` have started them."""
        paths = [*(node.disk / ".agent" / "log" for node in self.nodes), *sorted(self.base.glob("agent*.log"))]
        return "\n".join(f"--- {path.relative_to(self.base)}\n{tail(path)}" for path in paths)

    def close(self) -> None:
        try:
            self.stop_agents()
        finally:
            left = sorted({*processes_of(self.marker), *processes_of(f"{self.base}/")})
            commands = [
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left if is_running(pid)
            ]
            end(left)
            for process in self._agent_by_node.values():
                process.wait()
        assert not left, f"processes outlived their cluster: {commands}"
