"""The agents of the systemd unit, the DaemonSet and the side-car, with their own arguments, on two hosts in namespaces."""

import configparser
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.config import LEAVE_WITHIN_S
from replicated_ckpt.environment import HOST_ENV
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.agent.checkpoints import findings
from tests.harness.cluster import call
from tests.harness.hosts import Hosts, hosts_of, why_no_hosts
from tests.harness.launch import ByRank, base_environment, inside
from tests.harness.node import Node
from tests.harness.processes import end
from tests.launchers.test_launchers import LAUNCHERS, containers, pods
from tests.steps import cycles

pytestmark = [pytest.mark.long, pytest.mark.fault, pytest.mark.multiprocess, pytest.mark.timeout(600)]

UNIT = "replicated-ckpt-agent.service"
DAEMON_SET, SIDE_CAR = "kubernetes-agent.yaml", "kubernetes-sidecar.yaml"
CRASH_BACKOFF_S = 10.0
"""Kubelet's delay before it restarts a container that failed for the first time."""
WITHIN_S = 120.0


@dataclass(frozen=True)
class AgentLauncher:
    """How a launcher starts the agent, how long it waits before it restarts it, and how long the agent may take to
    exit.
    """

    command: list[str]
    root: str
    pause_s: float
    stop_within_s: float
    asks_for: str

    def on(self, node: Node) -> list[str]:
        """The command on `node`. Program, root and kubelet's variables are replaced, the other arguments are as
        shipped.
        """
        given = {self.root: str(node.root), "$(HOST_IP)": node.address}
        words = [given.get(word, word) for word in self.command[1:]]
        program = "import sys; from replicated_ckpt.cli.main import main; sys.exit(main())"
        return [*inside(node), sys.executable, "-c", program, *words]


def systemd_launcher() -> AgentLauncher:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # systemd's names have capitals
    unit.read(LAUNCHERS / UNIT)
    service = unit["Service"]
    assert service["Restart"] == "always"
    command = shlex.split(service["ExecStart"])
    root = command[command.index("--root") + 1]
    return AgentLauncher(command, root, float(service["RestartSec"]), float(service["TimeoutStopSec"]), "")


def kubelet_launcher(manifest: str) -> AgentLauncher:
    agent = agent_of_pod(manifest)
    (pod,) = pods(LAUNCHERS / manifest)
    assert agent.get("restartPolicy", "Always") == "Always"  # a DaemonSet allows no other policy
    (root,) = [mount["mountPath"] for mount in agent["volumeMounts"] if mount["name"] == "store"]
    grace_s = float(pod["terminationGracePeriodSeconds"])
    return AgentLauncher(agent["args"], root, CRASH_BACKOFF_S, grace_s, HOST_ENV)


def agent_of_pod(manifest: str) -> dict[str, Any]:
    (agent,) = [each for each in containers(LAUNCHERS / manifest) if each["name"] == "agent"]
    return agent


AGENT_LAUNCHERS: dict[str, Callable[[], AgentLauncher]] = {
    "systemd": systemd_launcher,
    "DaemonSet": lambda: kubelet_launcher(DAEMON_SET),
    "side-car": lambda: kubelet_launcher(SIDE_CAR),
}


class Supervisor:
    """Like systemd or kubelet on one host: restarts the agent whenever and however it ends."""

    def __init__(self, launcher: AgentLauncher, node: Node, log: Path) -> None:
        self._launcher, self._node, self._log = launcher, node, log
        self._is_over = threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {**base_environment(), **self._node.environment, "OF_HOSTS": str(self._log)}
        with self._log.open("ab") as log:
            return subprocess.Popen(self._launcher.on(self._node), env=environment, stdout=log, stderr=log)

    def _keep(self) -> None:
        while True:
            self.process.wait()
            if self._is_over.wait(self._launcher.pause_s):
                return
            self.process = self._start()

    def wait_until_it_serves(self) -> None:
        """Waits until the agent of this supervisor serves, and not another one."""
        wait_for(lambda: self._node.agent_pid() == self.process.pid, WITHIN_S, f"the agent of {self._log}")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def stop(self) -> int:
        """Stops the agent like `systemctl restart` or a deleted pod, within the launcher's time. Returns its exit
        status.
        """
        stopped = self.process
        stopped.terminate()
        return stopped.wait(self._launcher.stop_within_s)

    def end(self) -> None:
        self._is_over.set()
        while self._thread.is_alive():
            end([self.process.pid])
            self._thread.join(0.2)


@contextmanager
def supervised_agents(launcher: AgentLauncher) -> Iterator[tuple[Hosts, list[Supervisor]]]:
    """Two hosts, each with a serving agent. Ranks get the host's address in the manifest's variable."""
    if why := why_no_hosts():
        pytest.skip(why)
    with hosts_of(2, {}) as hosts, ExitStack() as stack:
        supervisors = []
        for index, node in enumerate(hosts.cluster.nodes):
            if launcher.asks_for:
                node.environment[launcher.asks_for] = node.address
            supervisor = Supervisor(launcher, node, hosts.cluster.base / f"kept-{index}.log")
            stack.callback(supervisor.end)
            supervisors.append(supervisor)
        for supervisor in supervisors:
            supervisor.wait_until_it_serves()
        yield hosts, supervisors


@pytest.mark.parametrize("by", AGENT_LAUNCHERS)
def test_an_agent_that_ends_is_started_again(by: str) -> None:
    """While ranks save, one host's agent gets SIGKILL and the other's SIGTERM. The launcher's next agents serve.

    They use the same ports, although ranks may start agents sooner. Every save loads and has both copies.
    """
    with supervised_agents(AGENT_LAUNCHERS[by]()) as (hosts, (first, second)):
        cluster, stop_file = hosts.cluster, hosts.cluster.base / "told"
        ports = [port_of(node) for node in cluster.nodes]
        saves = call(cycles.save_until, told=str(stop_file))
        with ThreadPoolExecutor(1) as thread:
            ranks = thread.submit(cluster.run, saves, nodes=[0, 1], timeout_s=4 * WITHIN_S)
            try:
                await_saves(cluster.nodes, ranks)
                second.kill()
                second.process.wait()
                await_saves(cluster.nodes, ranks)  # maybe with an agent that a rank started
                second.wait_until_it_serves()
                await_saves(cluster.nodes, ranks)
                assert first.stop() == 0
                await_saves(cluster.nodes, ranks)
                first.wait_until_it_serves()
                await_saves(cluster.nodes, ranks)
            finally:
                stop_file.touch()
                done, other = ranks.result()
                print(*done["failed"], *other["failed"], sep="\n")  # noqa: T201
        assert done["saved"] == other["saved"]
        assert len(done["failed"]) <= 2, "saves failed in which no agent ended"
        assert [port_of(node) for node in cluster.nodes] == ports
        for node in cluster.nodes:
            store = LocalStore(node.disk)
            wait_for(partial(holds_all, node, done["saved"]), WITHIN_S, f"all steps on {node.disk}")
            for step in done["saved"]:  # a save in which an agent was killed has one copy at first
                shards = [node.disk / f"step-{step}" / name for name in store.catalog.manifest(f"step-{step}").shards]
                wait_for(lambda: all(map(Path.exists, shards)), WITHIN_S, f"both copies of step-{step}")  # noqa: B023
            assert findings(store) == []


def holds_all(node: Node, steps: Sequence[int]) -> bool:
    return all((node.disk / f"step-{step}" / ".metadata").exists() for step in steps)


def port_of(node: Node) -> int:
    endpoint = read_endpoint(node.disk / ".agent")
    assert endpoint is not None
    return endpoint.port


def await_saves(nodes: Sequence[Node], ranks: "Future[ByRank[Any]]", more: int = 3) -> None:
    """Waits until every host has `more` further checkpoints. If the ranks end before, fails with their error or result."""
    before = [len(list(node.disk.glob("step-*/.metadata"))) for node in nodes]
    deadline = time.monotonic() + WITHIN_S
    while any(len(list(n.disk.glob("step-*/.metadata"))) < b + more for n, b in zip(nodes, before, strict=True)):
        if ranks.done():
            pytest.fail(f"the ranks ended by themselves, with {ranks.result()}")
        assert time.monotonic() < deadline, f"no {more} saves within {WITHIN_S} s"
        time.sleep(0.1)


def test_waiting_for_saves_ends_with_the_ranks(tmp_path: Path) -> None:
    """An error of the ranks is raised at once. Ranks that ended too early without one fail with their result."""
    failed, ended = Future[ByRank[Any]](), Future[ByRank[Any]]()
    failed.set_exception(AssertionError("rank 1 exited with -9"))
    ended.set_result(ByRank([{"saved": [1]}]))
    node: Any = SimpleNamespace(disk=tmp_path)
    with pytest.raises(AssertionError, match="rank 1 exited with -9"):
        await_saves([node], failed)
    with pytest.raises(pytest.fail.Exception, match=r"ended by themselves, with \[{'saved': \[1\]}\]"):
        await_saves([node], ended)


@pytest.mark.parametrize("manifest", [DAEMON_SET, SIDE_CAR])
def test_probes_detect_hung_and_ended_agents(manifest: str) -> None:
    """Each probe passes while the agent serves. Liveness fails if the agent hangs, and all probes fail if it has ended.

    An open port does not show a hang. A paused agent passes again once it continues: no probe has ended it.
    """
    agent, launcher = agent_of_pod(manifest), kubelet_launcher(manifest)
    probes = [agent[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] > LEAVE_WITHIN_S, (
        "the agent may first wait for one of a rank to exit"
    )
    ports = {each["name"]: each["containerPort"] for each in agent["ports"]}
    with supervised_agents(launcher) as (hosts, (supervisor, _)):
        node = hosts.cluster.nodes[0]

        def ask() -> list[bool]:
            return [passes(probe, ports, launcher, node) for probe in probes]

        assert ask() == [True, True, True]
        os.kill(supervisor.process.pid, signal.SIGSTOP)
        assert ask() == [True, True, False]
        os.kill(supervisor.process.pid, signal.SIGCONT)
        assert ask() == [True, True, True]
        supervisor.end()
        assert ask() == [False, False, False]


def passes(probe: dict[str, Any], ports: dict[str, int], launcher: AgentLauncher, node: Node) -> bool:
    """Runs a probe as kubelet does: in the container, or from the node to the pod's address. A late answer is a
    failure.
    """
    limit_s = probe.get("timeoutSeconds", 1)
    if "exec" in probe:
        command = replace(launcher, command=probe["exec"]["command"]).on(node)
    else:
        connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"
        port = ports[probe["tcpSocket"]["port"]]
        command = [*inside(node), sys.executable, "-c", connect, node.address, str(port), str(limit_s)]
        limit_s = WITHIN_S  # kubelet starts no interpreter
    try:
        done = subprocess.run(command, env=base_environment(), capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
