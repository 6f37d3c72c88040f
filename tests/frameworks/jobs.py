"""A user's program on two nodes: once undisturbed, and once killed, with a node lost, and started again."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.frameworks.running import ENVIRONMENT
from tests.harness.processes import end, processes_of

PROGRAMS = Path(__file__).parent / "programs"
Line = dict[str, Any]


@dataclass
class Job:
    """`program` on two nodes, each with a root in `directory`. Each rank writes one line per step and one at its end."""

    program: str
    directory: Path
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    launchers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    lines_before: list[int] = field(default_factory=list)
    """Number of lines of each rank when it was killed."""

    def root(self, node: int) -> Path:
        return self.directory / f"node-{node}"

    @property
    def out(self) -> Path:
        return self.directory / "out"

    def start(self, *arguments: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for node in (0, 1):
            command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(node), "--nproc-per-node", str(self.ranks), "--master-addr", "127.0.0.1"]
            command += ["--master-port", str(port), str(PROGRAMS / self.program), "--root", str(self.root(node))]
            command += ["--out", str(self.out), *self.arguments, *arguments]
            with (self.directory / f"log-{node}").open("a") as log:
                self.launchers.append(subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT))

    def finish(self) -> None:
        """Both launchers must end with 0."""
        for launcher in self.launchers:
            assert launcher.wait(400) == 0, self.log()
        self.launchers.clear()

    def lose_a_node(self) -> None:
        """When all ranks are stopped, kills them, the launchers and the second node's agent, and deletes that node's
        root.
        """
        self._await_standstill()
        for launcher in self.launchers:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
        end(processes_of(str(self.out)))
        end(processes_of(str(self.root(1))))
        shutil.rmtree(self.root(1))
        self._note_lines()

    def preempt(self) -> None:
        """When all ranks are stopped, sends SIGTERM to the launchers, which forward it. The ranks then continue and
        end.
        """
        ranks = self._await_standstill()
        for launcher in self.launchers:
            launcher.terminate()
        time.sleep(2)  # until torchrun has forwarded the signal
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        self.fail()

    def fail(self) -> None:
        """Both launchers must end by themselves with another status than 0. Remaining ranks are killed."""
        for launcher in self.launchers:
            assert launcher.wait(400) != 0, self.log()
        end(processes_of(str(self.out)))
        self._note_lines()

    def _note_lines(self) -> None:
        self.launchers.clear()
        self.lines_before = [len(self.lines(rank)) for rank in range(2 * self.ranks)]

    def _await_standstill(self, timeout_s: float = 300) -> list[int]:
        """Waits until all ranks are stopped. Returns their process ids."""
        deadline = time.monotonic() + timeout_s
        ranks = [pid for pid in processes_of(str(self.out)) if self._is_stopped(pid)]
        while len(ranks) < 2 * self.ranks:
            assert time.monotonic() < deadline, self.log()
            assert all(launcher.poll() is None for launcher in self.launchers), self.log()
            time.sleep(0.2)
            ranks = [pid for pid in processes_of(str(self.out)) if self._is_stopped(pid)]
        return ranks

    def clean_up(self) -> None:
        end(processes_of(str(self.directory)))
        for launcher in self.launchers:
            launcher.wait()

    def lines(self, rank: int) -> list[Line]:
        return [json.loads(line) for line in (self.out / f"rank-{rank}.jsonl").read_text().splitlines()]

    def log(self) -> str:
        return "".join((self.directory / f"log-{node}").read_text()[-4000:] for node in (0, 1))

    @staticmethod
    def _is_stopped(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False


def join(before: list[Line], after: list[Line], by: tuple[str, ...]) -> list[Line]:
    """The lines of both runs in order. Steps that the second run repeats, because they were not saved, count once."""
    again = {tuple(line.get(name) for name in by) for line in after}
    return [line for line in before if tuple(line.get(name) for name in by) not in again] + after


def check_same(undisturbed: Job, disturbed: Job, by: tuple[str, ...], first_again: Line) -> None:
    """Each rank of the disturbed job resumed after its checkpoint, and its lines equal the undisturbed job's."""
    for rank in range(2 * undisturbed.ranks):
        whole, both = undisturbed.lines(rank), disturbed.lines(rank)
        at = disturbed.lines_before[rank]
        before, after = both[:at], both[at:]
        assert {name: after[0][name] for name in first_again} == first_again
        assert join(before, after, by) == whole
        assert before == whole[: len(before)]


def lose_a_node(job: Job, step: int) -> None:
    """At `step`, all ranks are killed and a node is lost."""
    job.start("--hold-at", str(step))
    job.lose_a_node()


def raise_in_a_step(job: Job, step: int) -> None:
    """At `step`, the last rank raises, and the job fails."""
    job.start("--raise-at", str(step))
    job.fail()
    assert "raised on purpose" in job.log()


def preempt(job: Job, step: int) -> None:
    """At `step`, all ranks get SIGTERM."""
    job.start("--hold-at", str(step))
    job.preempt()


@contextlib.contextmanager
def run_both(
    program: str,
    directory: Path,
    at: int,
    options: tuple[str, ...] = (),
    *,
    disturb: Callable[[Job, int], None] = lose_a_node,
    ranks: int = 2,
) -> Iterator[tuple[Job, Job]]:
    """An undisturbed job, and one that was disturbed at step `at` and started again. Both have succeeded."""
    disturbed = Job(program, directory / "disturbed", ranks, options)
    undisturbed = Job(program, directory / "undisturbed", ranks, options)
    try:
        disturb(disturbed, at)
        disturbed.start()
        disturbed.finish()
        undisturbed.start()
        undisturbed.finish()
        yield undisturbed, disturbed
    finally:
        disturbed.clean_up()
        undisturbed.clean_up()
