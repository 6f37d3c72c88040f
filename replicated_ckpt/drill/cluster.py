"""The simulated nodes: starts jobs on them, kills them with their stores, and ends whatever it ever started."""

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
    """A free port of 127.0.0.1 outside the range from which Linux picks ports: so it is still free a moment later.

    If no port of that kind is free, it is any that is free now.
    """
    first_given = int(_GIVEN_PORTS.read_text().split()[0])
    ports = range(_FIRST_PORT, max(_FIRST_PORT, first_given))
    for port in random.SystemRandom().sample(ports, min(len(ports), _TRIES)):
        # Tried, not only drawn: another program may listen there.
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
    """The torchrun of one node in one job. It leads a session to which its ranks belong, but not its agent."""

    store: Path
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that run together: one torchrun per node, the first node is the coordinator's."""

    name: str
    nodes: tuple[NodeProcess, ...]
    ranks: int
    results: Path

    def wait_until_reported(self, limit_s: float) -> Evidence:
        """Block until every rank has written its report.

        Raises: DrillError if a node ended with an error before, or after `limit_s`, with the stacks of all ranks.
        """
        self._wait(lambda: count_reports(self.results) == self.ranks, "all ranks to report", limit_s, may_fail=False)
        return Evidence.read_evidence(self.results)

    def wait_until_ended(self, limit_s: float, *, except_on: Sequence[Path] = ()) -> None:
        """Block until the torchruns of all nodes, `except_on` these stores, have ended, in whatever way.

        Raises: DrillError after `limit_s`.
        """
        nodes = [node for node in self.nodes if node.store not in except_on]
        self._wait(lambda: all(node.process.poll() is not None for node in nodes), "its end", limit_s, may_fail=True)
        for node in nodes:
            _signal_session(node, signal.SIGKILL)  # ranks that outlived their torchrun; the agent has its own session

    def _wait(self, is_done: Callable[[], bool], what: str, limit_s: float, *, may_fail: bool) -> None:
        deadline = time.monotonic() + limit_s
        while not is_done():
            ended = [node for node in self.nodes if node.process.poll() is not None]
            # Asked again: the last report may have come between the two looks.
            if not may_fail and any(node.process.returncode for node in ended) and not is_done():
                raise DrillError(f"Job {self.name} ended too early.\n{self._write('error') or self._log_tails(ended)}")
            if time.monotonic() > deadline:
                raise DrillError(f"Job {self.name}: waited {limit_s:.0f} s for {what}.\n{self._stacks()}")
            time.sleep(processes.POLL_S)

    def _stacks(self) -> str:
        """Make every rank and torchrun dump its stacks (they listen to SIGUSR1), and read them."""
        for node in self.nodes:
            _signal_session(node, signal.SIGUSR1)
        time.sleep(STACKS_GRACE_S)  # the handlers give no sign when they are done
        return self._write("stacks") + self._log_tails(self.nodes)

    def _write(self, kind: str) -> str:
        """The files of this kind that ranks wrote into the results."""
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
    """All nodes under one work directory. One owner, one thread.

    Every process that it starts, and every descendant, carries the cluster's mark; `end` leaves none of them alive.
    """

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self._mark = uuid.uuid4().hex
        self._started: list[NodeProcess] = []

    def start(self, name: str, spec: JobSpec, stores: Sequence[Path], *, ranks_per_node: int) -> Job:
        """Start one torchrun per store, in node rank order. The spec's `results` must be a fresh folder's path."""
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
        """Run one command to its end.

        Raises: DrillError with the end of its output if it fails, or after `limit_s`.
        """
        node = self._start_node(name, self.workdir / name, command)
        job = Job(name, (node,), 0, self.workdir / name)
        job.wait_until_ended(limit_s)
        if node.process.returncode != 0:
            said = node.log.read_text(errors="replace").strip() or f"{name} failed without a word."
            message, _, hint = said.partition(HINT_MARK)  # an error of ours brings its own
            raise DrillError(message, hint or None)

    def kill_nodes(self, stores: Sequence[Path]) -> None:
        """Kills the nodes: SIGKILL to their torchruns, ranks and agents, then removes their stores.

        Raises: DrillError if something of one cannot be killed.
        """
        for store in stores:
            # A process that hangs in the kernel outlives SIGKILL, and would write into a store that is gone.
            if not processes.kill(self._mark_of(store), KILL_LIMIT_S):
                raise DrillError(f"Processes of {store.name} outlive SIGKILL.")
        for store in stores:
            # Only now: a process that lives would make files in the store again.
            shutil.rmtree(store)

    def stop_agents(self) -> bool:
        """Send SIGTERM to everything that still runs, after a job the agents; kill what does not stop.

        Returns: whether none had to be killed.
        """
        stopped = processes.stop(f"{self._mark}:", AGENT_STOP_LIMIT_S)
        self.end()
        return stopped

    def end(self) -> None:
        """Kill every process that was ever started here and is still alive. Idempotent."""
        for node in self._started:
            node.process.kill()  # one that begins its command at this moment shows no mark yet
        # By mark: agents have left the session of the torchrun that started them.
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
            "OMP_NUM_THREADS": "1",  # the same bits on every run
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same, on GPUs
            "GLOO_SOCKET_IFNAME": "lo",  # all nodes are this machine, whatever its name resolves to
            "DRILL_STORE": str(store),
            DOMAIN_ENV: store.name,  # a node of this machine stands for a host
        }
        with log.open("wb") as output, processes.hold_interrupts():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the drill, which ends the nodes in order
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
        # The whole session: torchrun alone would leave its ranks behind.
        os.killpg(node.process.pid, number)
