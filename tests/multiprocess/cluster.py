"""Simulated nodes on this machine: a store directory each, and process trees that are watched and always ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from tests.multiprocess.processes import end, is_running, processes_of, signal_if_running, wait_until_gone

REPOSITORY = Path(__file__).resolve().parents[2]
FIRST_FAILURE_GRACE_S = 10.0  # how long the other ranks may take to end after the first one failed
AGENT_STOP_S = 10.0

Launcher = Literal["direct", "torchrun", "single"]  # ranks forked from one process; torchrun per node; no group
Digests = dict[str, str]  # of a state, by the name of the value


@dataclass(frozen=True)
class Call:
    """One step of every rank: "saving.save" is the function `save` of steps_saving.py."""

    step: str
    arguments: dict[str, Any]


def call(step: str, **arguments: Any) -> Call:
    return Call(step, arguments)


@dataclass(frozen=True)
class Results:
    """What the ranks of one launch returned: `values[rank][step]`, and this package's warnings alike."""

    values: list[list[Any]]
    warnings: list[list[list[str]]]

    def of(self, step: int) -> list[Any]:
        """The value of one step, by rank."""
        return [values[step] for values in self.values]

    def agreed(self, step: int) -> Any:
        """The value of one step, which must be the same on every rank."""
        first, *others = self.of(step)
        assert all(other == first for other in others), f"ranks disagree about step {step}: {self.of(step)}"
        return first

    def digests(self, step: int) -> list[Digests]:
        """Of what a step loaded, by rank."""
        return [value["digests"] for value in self.of(step)]

    @property
    def all_warnings(self) -> list[str]:
        return [text for by_step in self.warnings for texts in by_step for text in texts]


@dataclass
class Node:
    """A simulated node. Its ranks see its store at `root`; it lies at `disk` (the same, but for private mounts)."""

    root: Path
    disk: Path

    def agent_pid(self) -> int | None:
        try:
            pid = int(json.loads((self.disk / ".agent" / "endpoint.json").read_text())["pid"])
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
        folder = self.disk / ".staging"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []

    def files(self, checkpoint_id: str) -> set[str]:
        return {path.name for path in (self.disk / checkpoint_id).iterdir()}


@dataclass
class Cluster:
    """Nodes under `base`, which must be this cluster's own. `close` ends every process that was ever started here."""

    base: Path
    node_count: int
    private_mounts: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.marker = f"replicated-ckpt-test-{uuid.uuid4().hex}"
        self._launches = 0
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
        calls: Sequence[Call],
        *,
        nodes: Sequence[int],
        ranks: int | Sequence[int] = 1,
        launcher: Launcher = "direct",
        timeout_s: float = 90.0,
    ) -> Results:
        """Runs the calls, one after the other, on every rank of a new world, and waits for its end.

        `nodes` in their rank order; `ranks` on each of them. Any failing rank, or `timeout_s`, fails the test with the
        output, the tracebacks and, if something hung, the stacks of all threads of all ranks.
        """
        counts = [ranks] * len(nodes) if isinstance(ranks, int) else list(ranks)
        self._launches += 1
        folder = self.base / f"launch{self._launches}"
        folder.mkdir()
        spec = {"calls": [[c.step, c.arguments] for c in calls], "roots": [str(node.root) for node in self.nodes]}
        (folder / "spec.json").write_text(json.dumps(spec))
        launch = _Launch(self, folder)
        try:
            launch.start(nodes, counts, launcher)
            launch.wait(timeout_s)
            return launch.results(sum(counts))
        finally:
            launch.end_ranks()

    def stop_agents(self) -> None:
        """SIGTERM to every agent, which must be enough."""
        pids = [pid for node in self.nodes if (pid := node.agent_pid())]
        for pid in pids:
            signal_if_running(pid, signal.SIGTERM)
        stubborn = wait_until_gone(pids, AGENT_STOP_S)
        logs = {str(node.disk): _tail(node.disk / ".agent" / "log") for node in self.nodes} if stubborn else {}
        end(stubborn)
        assert not stubborn, f"agents {stubborn} ignored SIGTERM for {AGENT_STOP_S} s: {logs}"

    def close(self) -> None:
        try:
            self.stop_agents()
        finally:
            left = sorted({*processes_of(self.marker), *processes_of(f"{self.base}/")})
            commands = [
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left if is_running(pid)
            ]
            end(left)
        assert not left, f"processes outlived their cluster: {commands}"


@dataclass
class _Launch:
    """The processes of one world, from start to end."""

    cluster: Cluster
    folder: Path

    def __post_init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.marker = f"{self.cluster.marker}-{self.folder.name}"

    def start(self, nodes: Sequence[int], counts: Sequence[int], launcher: Launcher) -> None:
        port = _free_port()
        if launcher == "torchrun":
            for node_rank, (node, count) in enumerate(zip(nodes, counts, strict=True)):
                self._spawn(
                    node, ["-m", *_torchrun(len(nodes), node_rank, count, port), *self._worker], {}, f"node{node}"
                )
            return
        ranks = [(node, local) for node, count in zip(nodes, counts, strict=True) for local in range(count)]
        worlds = [
            {
                "RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": counts[nodes.index(node)],
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "REPLICATED_CKPT_TEST_NODE": node,
            }
            for rank, (node, local) in enumerate(ranks)
        ]  # fmt: skip
        environments = [{name: str(value) for name, value in world.items()} for world in worlds]
        if launcher == "single":
            self._spawn(nodes[0], ["-m", *self._worker], {}, "rank0")
        elif self.cluster.private_mounts or len(ranks) == 1:
            for rank, (node, _) in enumerate(ranks):
                self._spawn(node, ["-m", *self._worker], environments[rank], f"rank{rank}")
        else:
            forked = [
                {"env": env, "log": str(self.folder / f"rank{rank}.log")} for rank, env in enumerate(environments)
            ]
            spec = str(self.folder / "spec.json")
            self._spawn(nodes[0], ["-m", "tests.multiprocess.forked", spec, json.dumps(forked)], {}, "forked")

    @property
    def _worker(self) -> list[str]:
        return ["tests.multiprocess.worker", str(self.folder / "spec.json")]

    def _spawn(self, node: int, arguments: list[str], env: dict[str, str], name: str) -> None:
        paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
        environment = {
            **{key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}},
            "PYTHONPATH": ":".join([*paths, str(REPOSITORY)]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.cluster.base / "tmp"),
            "REPLICATED_CKPT_TEST_NODE": str(node),
            "REPLICATED_CKPT_TEST_LAUNCH": self.marker,
            **self.cluster.environment,
            **env,
        }
        command = [*self._mounts(node), sys.executable, *arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _mounts(self, node: int) -> list[str]:
        if not self.cluster.private_mounts:
            return []
        where = self.cluster.nodes[node]
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh", str(where.disk), str(where.root)]

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        failed_first = False
        while any(process.poll() is None for process in self.processes):
            if not failed_first and any(process.poll() for process in self.processes):
                failed_first = True
                deadline = min(deadline, time.monotonic() + FIRST_FAILURE_GRACE_S)
            if time.monotonic() > deadline:
                self._dump_stacks()
                raise AssertionError(f"{'hung after a failure' if failed_first else 'hung'}\n{self._report()}")
            time.sleep(0.05)
        if any(process.returncode for process in self.processes):
            raise AssertionError(f"exit codes {[process.returncode for process in self.processes]}\n{self._report()}")

    def results(self, world_size: int) -> Results:
        by_rank = [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
        return Results([entry["values"] for entry in by_rank], [entry["warnings"] for entry in by_rank])

    def end_ranks(self) -> None:
        """Kills what is left of this world's ranks, and of torchrun; the agents live on."""
        agents = {node.agent_pid() for node in self.cluster.nodes}
        if any(process.poll() is None for process in self.processes):
            end([pid for pid in processes_of(self.marker) if pid not in agents])
        for process in self.processes:
            process.wait()

    def _dump_stacks(self) -> None:
        for path in self.folder.glob("rank*.pid"):
            signal_if_running(int(path.read_text()), signal.SIGUSR1)
        time.sleep(1.0)

    def _report(self) -> str:
        files = [*self.folder.glob("rank*.json"), *self.folder.glob("*.log"), *self.folder.glob("rank*.stacks")]
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in sorted(files) if path.stat().st_size)


def _tail(path: Path, size_bytes: int = 4000) -> str:
    return path.read_bytes()[-size_bytes:].decode(errors="replace") if path.exists() else ""


def _torchrun(nodes: int, node_rank: int, count: int, port: int) -> list[str]:
    flags = f"--nnodes={nodes} --node-rank={node_rank} --nproc-per-node={count} --master-addr=127.0.0.1"
    return ["torch.distributed.run", *flags.split(), f"--master-port={port}", "-m"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
