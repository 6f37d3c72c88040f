"""One world of ranks from start to end: forked from the zygote, or started by torchrun. It is watched and always ended."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NoReturn, ParamSpec, TypeVar

from replicated_ckpt.drill.cluster import find_free_port
from replicated_ckpt.environment import DOMAIN_ENV
from tests.harness.node import Node
from tests.harness.processes import end, is_ending, processes_of, signal_if_running
from tests.harness.zygote import REPOSITORY, Rank, the_zygote

if TYPE_CHECKING:
    from tests.steps.context import Context

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

FIRST_FAILURE_GRACE_S = 30.0  # time for the other ranks to end after the first failure
COLLECTIVE_TIMEOUT_ENV = "REPLICATED_CKPT_TEST_COLLECTIVE_S"  # seconds; time-out of a launch's process group
_POLL_S = 0.02

Launcher = Literal["direct", "torchrun", "single"]  # ranks from the zygote; torchrun per node; one rank and no group
Digests = dict[str, str]  # of a state, by the name of the value


@dataclass(frozen=True, eq=False)
class Call(Generic[T_co]):
    """A step for every rank: a function of tests/steps or benchmarks, called with the rank's context and these
    arguments.

    Arguments and results travel as JSON, so a tuple arrives as a list. A call equals only itself.
    """

    step: Callable[..., T_co]
    arguments: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"module": self.step.__module__, "function": self.step.__name__, "arguments": self.arguments}


def call(step: "Callable[Concatenate[Context, P], T]", *nothing: P.args, **arguments: P.kwargs) -> Call[T]:
    """`call(state.save, kinds=["plain"], checkpoint_id="step-1")`. All arguments are passed by name."""
    assert not nothing, f"{step.__name__} takes its arguments by name"
    assert "." not in step.__qualname__, f"{step.__qualname__} is no function of a module: ranks cannot import it"
    return Call(step, arguments)


def step_of(as_json: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of a call that arrived as JSON."""
    step: Callable[..., Any] = getattr(import_module(as_json["module"]), as_json["function"])
    return step


Step = Call[T] | Callable[..., T]


def place_of(step: Step[Any], calls: Sequence[Call[Any]]) -> int:
    """The index of a call among these. A function identifies the only call that has it."""
    places = [place for place, each in enumerate(calls) if step in (each, each.step)]
    assert len(places) == 1, f"{len(places)} of the calls {calls} are {step}"
    return places[0]


class ByRank(list[T]):
    """The results of a call, by rank."""

    def agreed(self) -> T:
        """The result, which must be the same on every rank."""
        assert all(other == self[0] for other in self), f"ranks disagree: {self}"
        return self[0]

    def digests(self: "ByRank[dict[str, Any]]") -> "ByRank[Digests]":
        """The digests of what a step loaded."""
        return ByRank(value["digests"] for value in self)


@dataclass(frozen=True)
class Results:
    """The ranks' results of one launch, and this package's warnings: `results.of(state.load)[rank]`."""

    calls: Sequence[Call[Any]]
    reports: Sequence[Mapping[str, Any]]  # by rank

    def of(self, step: Step[T]) -> ByRank[T]:
        """The results of a call. Its function identifies it, too, if no other call of this launch has that function."""
        place = place_of(step, self.calls)
        return ByRank(report["values"][place] for report in self.reports)

    def warnings_of(self, step: Step[Any]) -> ByRank[list[str]]:
        """This package's warnings during one call."""
        place = place_of(step, self.calls)
        return ByRank(report["warnings"][place] for report in self.reports)

    @property
    def all_warnings(self) -> list[str]:
        return [text for report in self.reports for texts in report["warnings"] for text in texts]


@dataclass(frozen=True)
class Attempt:
    """The outcome of a launch in which ranks may fail or die.

    `codes`: exit codes by rank, -9 after SIGKILL. None: the harness ended the rank after the first failure, as a
    launcher does. `failures`: the traceback of the step in which a rank failed, or the end of its output if it failed
    before its first step.
    """

    calls: Sequence[Call[Any]]
    codes: list[int | None]
    failures: list[str]
    values: list[list[Any]]  # by rank, of the steps that it ended

    def of(self, step: Step[T]) -> dict[int, T]:
        """The results of a call, by rank, for the ranks that completed it."""
        place = place_of(step, self.calls)
        return {rank: values[place] for rank, values in enumerate(self.values) if len(values) > place}


@dataclass
class Launch:
    """The processes of one world. `nodes`: all nodes of the cluster, of which a launch uses some."""

    nodes: Sequence[Node]
    folder: Path
    marker: str
    environment: Mapping[str, str]
    _processes: "list[subprocess.Popen[bytes] | Rank]" = field(default_factory=list)

    def start(self, nodes: Sequence[int], counts: Sequence[int], launcher: Launcher) -> None:
        port, master = find_free_port(), self.nodes[nodes[0]].address
        if launcher == "torchrun":
            for node_rank, (node, count) in enumerate(zip(nodes, counts, strict=True)):
                self._spawn(node, [*_torchrun(len(nodes), node_rank, count, master, port), *self._worker])
        elif launcher == "single":
            self._fork(nodes[0], 0, {})
        else:
            ranks = [(node, local) for node, count in zip(nodes, counts, strict=True) for local in range(count)]
            world = {"WORLD_SIZE": len(ranks), "MASTER_ADDR": master, "MASTER_PORT": port}
            for rank, (node, local) in enumerate(ranks):
                local_size = counts[list(nodes).index(node)]
                place = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_size, **world}
                self._fork(node, rank, {name: str(value) for name, value in place.items()})

    @property
    def _worker(self) -> list[str]:
        return ["tests.harness.worker", str(self.folder / "spec.json")]

    def _environment(self, node: int, env: Mapping[str, str]) -> dict[str, str]:
        return {
            "REPLICATED_CKPT_TEST_LAUNCH": self.marker,
            "REPLICATED_CKPT_TEST_NODE": str(node),
            DOMAIN_ENV: f"node{node}",  # The nodes of this machine represent hosts.
            **self.environment,
            **self.nodes[node].environment,
            **env,
        }

    def _fork(self, node: int, rank: int, env: Mapping[str, str]) -> None:
        place = self.nodes[node]
        self._processes.append(
            the_zygote().fork(
                self._environment(node, env),
                self.folder,
                self.folder / f"rank{rank}.log",
                mounts=place.mounts(),
                hostname=place.hostname,
                netns=place.netns,
            )
        )

    def _spawn(self, node: int, arguments: Iterable[str]) -> None:
        with (self.folder / f"node{node}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*inside(self.nodes[node]), sys.executable, "-m", *arguments],
                    cwd=self.folder,
                    env=self._environment(node, {}),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def wait(self, timeout_s: float) -> None:
        if not self._has_ended(timeout_s, FIRST_FAILURE_GRACE_S):
            self._raise_hung()
        if any(self._codes()):
            raise AssertionError(f"exit codes {self._codes()}\n{self._report()}")

    def attempt(
        self, calls: Sequence[Call[Any]], timeout_s: float, grace_s: float, awaited: Sequence[int] | None
    ) -> Attempt:
        """Waits for the ranks. After the first failure, the other ranks, or the awaited ones, have `grace_s` to end by
        themselves.
        """
        if not self._has_ended(timeout_s, grace_s, awaited) and not any(self._codes()):
            self._raise_hung()
        self._await_ending()
        codes = self._codes()
        self.end_ranks()
        reports = [self._report_of(rank) for rank in range(len(codes))]
        failures = [
            report["failure"] or self._printed(rank, code)
            for rank, (report, code) in enumerate(zip(reports, codes, strict=True))
        ]
        return Attempt(tuple(calls), codes, failures, [report["values"] for report in reports])

    def _printed(self, rank: int, code: int | None) -> str:
        """The output of a rank that failed by itself and was not ended by the harness."""
        return tail(self.folder / f"rank{rank}.log") if code is not None and code > 0 else ""

    def _await_ending(self) -> None:
        """Waits for ranks that the kernel is ending. Other ranks may notice this, and fail, before the harness does."""
        deadline = time.monotonic() + FIRST_FAILURE_GRACE_S
        while any(process.poll() is None and is_ending(process.pid) for process in self._processes):
            assert time.monotonic() < deadline, f"the kernel does not end {self._processes}"
            time.sleep(_POLL_S)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _has_ended(self, timeout_s: float, grace_s: float, awaited: Sequence[int] | None = None) -> bool:
        """Whether every awaited rank ended in time and, after the first failure, the others within `grace_s`."""
        deadline = time.monotonic() + timeout_s
        is_failed = False
        ranks = range(len(self._processes)) if awaited is None else awaited
        while any((codes := self._codes())[rank] is None for rank in ranks):
            if any(codes) and not is_failed:
                is_failed = True
                deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _raise_hung(self) -> NoReturn:
        when = " after a failure" if any(self._codes()) else ""
        for path in self.folder.glob("rank*.pid"):
            signal_if_running(int(path.read_text()), signal.SIGUSR1)
        time.sleep(1.0)
        raise AssertionError(f"hung{when}\n{self._report()}")

    def _report_of(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"rank{rank}.json"
        report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"values": [], "failure": ""}
        return report

    def results(self, calls: Sequence[Call[Any]], world_size: int) -> Results:
        return Results(tuple(calls), [self._report_of(rank) for rank in range(world_size)])

    def end_ranks(self) -> None:
        """Kills the remaining ranks of this world, and torchrun. Agents live on."""
        agents = {node.agent_pid() for node in self.nodes}
        left = {process.pid for process in self._processes if process.poll() is None}
        if left:
            end([pid for pid in {*left, *processes_of(self.marker)} if pid not in agents])
        for process in self._processes:
            process.wait()

    def _report(self) -> str:
        files = [*self.folder.glob("rank*.json"), *self.folder.glob("*.log"), *self.folder.glob("rank*.stacks")]
        told = {path: f"{_crash(path)}{tail(path)}" for path in sorted(files) if path.stat().st_size}
        return "\n".join(f"--- {path.name}\n{text}" for path, text in told.items())


def _crash(path: Path, size_bytes: int = 3000) -> str:
    """The stack of the crashed thread of a rank that died of a signal such as SIGSEGV. It is not the last stack of the
    output.
    """
    found = path.read_text(errors="replace") if path.suffix == ".stacks" else ""
    start = found.find("Fatal Python error")
    at = max(found.find("Current thread", start), start)
    return f"{found[start:][:80].splitlines()[0]}\n{found[at : at + size_bytes]}\n[...]\n" if start >= 0 else ""


def tail(path: Path, size_bytes: int = 4000) -> str:
    return path.read_bytes()[-size_bytes:].decode(errors="replace") if path.exists() else ""


def base_environment() -> dict[str, str]:
    """The environment of every process of a cluster: the harness's own, without the variables that identify a rank."""
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    return {
        **{key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}},
        "PYTHONPATH": ":".join([*paths, str(REPOSITORY)]),
        "OMP_NUM_THREADS": "1",
    }


def inside(node: Node) -> list[str]:
    """The start of a command that runs on a node: with its disk at its root, under its host name, in its network."""
    network = ["ip", "netns", "exec", node.netns] if node.netns else []
    steps = [f"mount --bind {shlex.quote(source)} {shlex.quote(target)}" for source, target in node.mounts()]
    if node.hostname:
        steps.append(f"echo {node.hostname} > /proc/sys/kernel/hostname")
    if not steps:
        return network
    return [*network, "unshare", "--mount", "--uts", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh"]


def _torchrun(nodes: int, node_rank: int, count: int, master: str, port: int) -> list[str]:
    flags = f"--nnodes={nodes} --node-rank={node_rank} --nproc-per-node={count} --master-addr={master}"
    return ["torch.distributed.run", *flags.split(), f"--master-port={port}", "-m"]
