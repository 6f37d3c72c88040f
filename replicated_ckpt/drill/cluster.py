"""The simulated nodes: starts jobs on them, kills nodes with their stores, and ends every process that it started."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt.drill import processes
from replicated_ckpt.drill.evidence import Evidence, JobSpec, count_reports
from replicated_ckpt.drill.plan import DrillError
from replicated_ckpt.environment import DOMAIN_ENV
from replicated_ckpt.errors import HINT_MARK

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_TRIES = 100


def find_free_port() -> int:
    """A free port of 127.0.0.1 outside the range from which Linux assigns ports, so that it stays free.

    If no such port is found, any port that is free now.
    """
    first_given = int(_GIVEN_PORTS.read_text().split()[0])
    ports = range(_FIRST_PORT, max(_FIRST_PORT, first_given))
    for port in random.SystemRandom().sample(ports, min(len(ports), _TRIES)):
        # Binds the port: another program may listen there.
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


PACKAGE_PARENT = Path(__file__).resolve().parents[2]
KILL_LIMIT_S = 10.0
AGENT_STOP_LIMIT_S = 5.0
STACKS_GRACE_S = 1.0
LOG_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """The torchrun of one node in one job. It leads a session that contains its ranks, but not the agent."""

    store: Path
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that run together: one torchrun per node. The first node is the coordinator's."""

    name: str
    nodes: tuple[NodeProcess, ...]
    ranks: int
    results: Path

    def wait_until_reported(self, limit_s: float) -> Evidence:
        """Waits until every rank has written its report, and returns the reports.

        Raises:
            DrillError: a torchrun failed before that; or after `limit_s`, with the stacks of all ranks.
        """
        self._wait(lambda: count_reports(self.results) == self.ranks, "all ranks to report", limit_s, may_fail=False)
        return Evidence.read_evidence(self.results)

    def wait_until_ended(self, limit_s: float, *, except_on: Sequence[Path] = ()) -> None:
        """Waits until the torchruns of all nodes have ended, with success or not, except those of the stores `except_on`.

        Raises:
            DrillError: one still runs after `limit_s`.
        """
        nodes = [node for node in self.nodes if node.store not in except_on]
        self._wait(lambda: all(node.process.poll() is not None for node in nodes), "its end", limit_s, may_fail=True)
        for node in nodes:
            _signal_session(node, signal.SIGKILL)  # ranks that outlived their torchrun; agents have other sessions

    def _wait(self, is_done: Callable[[], bool], what: str, limit_s: float, *, may_fail: bool) -> None:
        deadline = time.monotonic() + limit_s
        while not is_done():
            ended = [node for node in self.nodes if node.process.poll() is not None]
            # Asks is_done again: the last report may have come just before the torchrun ended.
            if not may_fail and any(node.process.returncode for node in ended) and not is_done():
                raise DrillError(f"Job {self.name} ended too early.\n{self._write('error') or self._log_tails(ended)}")
            if time.monotonic() > deadline:
                raise DrillError(f"Job {self.name}: waited {limit_s:.0f} s for {what}.\n{self._stacks()}")
            time.sleep(processes.POLL_S)

    def _stacks(self) -> str:
        """Sends SIGUSR1, on which every rank and torchrun dumps its stacks, and reads them."""
        for node in self.nodes:
            _signal_session(node, signal.SIGUSR1)
        time.sleep(STACKS_GRACE_S)  # the handlers do not report when they have finished
        return self._write("stacks") + self._log_tails(self.nodes)

    def _write(self, kind: str) -> str:
        """The content of the ranks' files of this kind in the results folder."""
        written = {path.name: path.read_text() for path in sorted(self.results.glob(f"{kind}-rank-*.txt"))}
        return "".join(f"--- {name}\n{text}\n" for name, text in written.items() if text)

    def _log_tails(self, nodes: Sequence[NodeProcess]) -> str:
        tails = [
            f"--- {node.log.name}\n" + "\n".join(node.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            for node in nodes
            if node.process.returncode != 0
        ]
        return "\n".join(tails)


class Cluster:
    """All nodes under one work directory. For one thread.

    Every process that it starts, and every descendant, has the cluster's mark in its environment. `end` kills all of them.
    """

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self._mark = uuid.uuid4().hex
        self._started: list[NodeProcess] = []

    def start(self, name: str, spec: JobSpec, stores: Sequence[Path], *, ranks_per_node: int) -> Job:
        """Starts one torchrun per store, in node rank order. The folder `results` of the spec must not exist yet."""
        results = Path(spec.results)
        results.mkdir(parents=True)
        spec_path = results / "job.json"
        spec.write_spec(spec_path)
        port = find_free_port()
        nodes = tuple(
            self._start_node(
                f"{name}-{store.name}", store, _torchrun(node, len(stores), ranks_per_node, port, spec_path)
            )
            for node, store in enumerate(stores)
        )
        return Job(name, nodes, len(stores) * ranks_per_node, results)

    def run_alone(self, name: str, command: Sequence[str], limit_s: float) -> None:
        """Runs one command to its end.

        Raises:
            DrillError: the command failed, with its output; or it still runs after `limit_s`.
        """
        node = self._start_node(name, self.workdir / name, command)
        job = Job(name, (node,), 0, self.workdir / name)
        job.wait_until_ended(limit_s)
        if node.process.returncode != 0:
            said = node.log.read_text(errors="replace").strip() or f"{name} failed without output."
            message, _, hint = said.partition(HINT_MARK)  # errors of this package have a hint
            raise DrillError(message, hint or None)

    def kill_nodes(self, stores: Sequence[Path]) -> None:
        """Sends SIGKILL to the torchruns, ranks and agents of these nodes, then removes their stores.

        Raises:
            DrillError: a process survives SIGKILL.
        """
        for store in stores:
            # A process that hangs in the kernel survives SIGKILL, and would write into the removed store.
            if not processes.kill(self._mark_of(store), KILL_LIMIT_S):
                raise DrillError(f"Processes of {store.name} survive SIGKILL.")
        for store in stores:
            # After the processes: a running one would create files in the store again.
            shutil.rmtree(store)

    def stop_agents(self) -> bool:
        """Sends SIGTERM to all processes that still run, which after a job are the agents. Kills those that do not stop.

        Returns:
            whether all stopped by themselves.
        """
        stopped = processes.stop(f"{self._mark}:", AGENT_STOP_LIMIT_S)
        self.end()
        return stopped

    def end(self) -> None:
        """Kills every process that this cluster started and that still runs. May be called again."""
        for node in self._started:
            node.process.kill()  # before its exec, a new process has no mark
        # By mark: agents have their own sessions.
        processes.kill(f"{self._mark}:", KILL_LIMIT_S)
        for node in self._started:
            node.process.wait(KILL_LIMIT_S)
        self._started.clear()

    def _mark_of(self, store: Path) -> str:
        return f"{self._mark}:{store}:"

    def _start_node(self, name: str, store: Path, command: Sequence[str]) -> NodeProcess:
        log = self.workdir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            processes.MARK_VARIABLE: self._mark_of(store),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",  # for the same bits in every run
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same for GPUs
            "GLOO_SOCKET_IFNAME": "lo",  # all nodes are on this machine, whatever its name resolves to
            "DRILL_STORE": str(store),
            DOMAIN_ENV: store.name,  # each simulated node is a failure domain
        }
        with log.open("wb") as output, processes.hold_interrupts():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the drill, which ends the nodes in order
            )
            node = NodeProcess(store, process, log)
            self._started.append(node)
        return node


def _torchrun(node: int, nodes: int, ranks_per_node: int, port: int, spec_path: Path) -> tuple[str, ...]:
    worker = Path(__file__).parent / "job" / "worker.py"
    return (
        *(sys.executable, "-m", "replicated_ckpt.drill.job.launcher"),
        *("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks_per_node)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", "127.0.0.1"),
        *("--start-method", "fork", "--run-path", str(worker), str(spec_path)),
    )


def _signal_session(node: NodeProcess, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        # The whole session: a signal to torchrun alone would leave its ranks running.
        os.killpg(node.process.pid, number)
