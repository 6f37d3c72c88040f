"""The script for torchrun, with its own arguments, on two hosts. One host is lost with all its processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness.hosts import Hosts, hosts_of, why_no_hosts
from tests.harness.launch import base_environment, inside, tail
from tests.harness.network import ranks_address
from tests.harness.processes import end, processes_of
from tests.launchers.test_launchers import LAUNCHERS, ROOT

pytestmark = [pytest.mark.long, pytest.mark.fault, pytest.mark.multiprocess, pytest.mark.timeout(600)]

PORT = 29400
WITHIN_S = 200.0
BACK_WITHIN_S = 120.0
"""Torchrun itself takes 8 s. This machine also imports torch four times."""


class Job:
    """Runs the script on both hosts, with a log file for each."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int, *, rendezvous: int, steps: int) -> None:
        node = self._hosts.cluster.nodes[host]
        environment = {
            **base_environment(),
            **node.environment,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RDZV": f"{ranks_address(rendezvous)}:{PORT}",
            "NODES": "1:2",
            "ROOT": str(node.root),
            "REPLICATED_CKPT_AGENT_IDLE_S": "30",
            "OF_HOST": self._mark(host),
        }
        script = ["bash", str(LAUNCHERS / "torchrun_elastic.sh"), str(ROOT / "examples" / "fashion_mnist.py")]
        command = [*inside(node), *script, f"--steps={steps}", "--save-every=10", "--batch=2"]
        with self._log(host).open("ab") as log:
            self._running[host] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def lose(self, host: int) -> None:
        """Kills all processes of the host and deletes its disk."""
        self.kill(host)
        self._hosts.cluster.nodes[host].lose()

    def kill(self, host: int) -> None:
        end(processes_of(self._mark(host)))
        if host in self._running:
            self._running.pop(host).wait()

    def wait(self, host: int) -> None:
        """Waits until the script has succeeded on the host."""
        self.wait_until(lambda: self._running[host].poll() == 0, f"the end on host {host}")

    def wait_until(self, is_so: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
        """Waits for a condition. Fails at once if the script fails on either host."""
        deadline = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {within_s} s\n{self.logs()}"
            assert not any(process.poll() for process in self._running.values()), f"{what}:\n{self.logs()}"
            time.sleep(0.2)

    def newest(self, host: int) -> int:
        found = self._hosts.cluster.nodes[host].disk.glob("step-*/.metadata")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)

    def logs(self) -> str:
        return "\n".join(f"--- host {host}\n{tail(self._log(host), 20_000)}" for host in (0, 1))

    def stop(self) -> None:
        for host in (0, 1):
            self.kill(host)

    def _mark(self, host: int) -> str:
        return f"{self._hosts.network.name}-host-{host}"

    def _log(self, host: int) -> Path:
        return self._hosts.cluster.base / f"host-{host}.log"


@pytest.fixture
def job() -> Iterator[Job]:
    if why := why_no_hosts():
        pytest.skip(why)
    with ExitStack() as stack:
        hosts = stack.enter_context(hosts_of(2, {}))
        found = Job(hosts)
        stack.callback(found.stop)
        yield found


def test_a_blank_host_joins_in_place_of_a_lost_one(job: Job) -> None:
    """The remaining host goes on alone. When the script starts on a blank host, both go on together.

    Ranks that share torchrun's store would end with DistStoreError after a minute instead.
    """
    for host in (0, 1):
        job.start(host, rendezvous=0, steps=100_000)
    job.wait_until(lambda: job.newest(1) > 0, "a checkpoint on both hosts")
    job.lose(1)
    lost_at = job.newest(0)
    job.wait_until(lambda: job.newest(0) > lost_at + 10, "host 0 alone")
    job.start(1, rendezvous=0, steps=100_000)
    job.wait_until(lambda: job.newest(1) > lost_at, "both hosts again", BACK_WITHIN_S)
    assert job.logs().count("starting at step 0 ") == 1, job.logs()


def test_the_script_resumes_after_the_rendezvous_host_is_lost(job: Job) -> None:
    """Host 0 is lost with its disk, the rendezvous and rank 0.

    The script, started again on host 1 alone, resumes from host 1's disk.
    """
    for host in (0, 1):
        job.start(host, rendezvous=0, steps=100_000)
    job.wait_until(lambda: job.newest(1) > 0, "a checkpoint on both hosts")
    job.lose(0)
    job.kill(1)  # its torchrun waits for the lost rendezvous; the user ends it
    saved = job.newest(1)
    job.start(1, rendezvous=1, steps=saved + 10)
    job.wait(1)
    assert f"starting at step {saved} on 1 ranks" in job.logs()
