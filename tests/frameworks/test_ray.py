"""Ray Train on a cluster of two nodes: after one is lost with its store, the run equals an undisturbed one."""

import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.frameworks.running import ENVIRONMENT, EVERY, EXAMPLES, STEPS, contents, lines, require
from tests.harness.processes import end, processes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(600)]

START = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start"]
START += [
    "--object-store-memory",
    "100000000",
    "--disable-usage-stats",
    "--min-worker-port",
    "0",
    "--max-worker-port",
    "0",
]


class Cluster:
    """Ray with one CPU per worker. In each node's processes, NODE_DISK is the path of the node's disk."""

    def __init__(self, directory: Path, workers_each: int) -> None:
        self.directory, self.workers_each = directory, workers_each
        # Without this token Ray creates one in the home directory.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**ENVIRONMENT, **token, "RAY_USAGE_STATS_ENABLED": "0"}

    def disk(self, node: int) -> Path:
        return self.directory / f"node-{node}"

    def start(self, node: int) -> None:
        if node == 0:
            own = self.directory / "ray"  # Ray makes this directory writable for all users, so no root may lie in it
            self._start(node, "--head", "--port", "0", "--temp-dir", str(own), "--include-dashboard", "false")
            self.environment["RAY_ADDRESS"] = (own / "ray_current_cluster").read_text()
        else:
            self._start(node, "--address", self.environment["RAY_ADDRESS"])

    def _start(self, node: int, *arguments: str) -> None:
        subprocess.run(
            [*START, "--num-cpus", str(self.workers_each), *arguments],
            env={**self.environment, "NODE_DISK": str(self.disk(node))},
            timeout=60,
            check=True,
        )

    def lose(self, node: int) -> None:
        """Kills all processes of the node and deletes its disk."""
        end(processes_of(f"NODE_DISK={self.disk(node)}"))
        shutil.rmtree(self.disk(node))


class Training:
    """Runs the example's driver on this cluster."""

    def __init__(self, cluster: Cluster, name: str, *arguments: str) -> None:
        command = [sys.executable, "-W", "ignore", str(EXAMPLES / "ray_train.py"), "--root", f"$NODE_DISK/{name}"]
        command += ["--storage", str(cluster.directory / "storage"), "--steps", str(STEPS), "--save-every", str(EVERY)]
        command += ["--workers", str(2 * cluster.workers_each)]
        self.output = cluster.directory / f"{name}.out"
        with self.output.open("w") as output:
            self.driver = subprocess.Popen(
                [*command, *arguments], stdout=output, stderr=subprocess.STDOUT, env=cluster.environment
            )

    def wait_for(self, line: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while line not in self.output.read_text():
            assert self.driver.poll() is None, self.output.read_text()[-4000:]
            assert time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(0.05)

    def wait_for_output(self, timeout_s: float) -> str:
        """The whole output. The driver must have succeeded."""
        assert self.driver.wait(timeout_s) == 0, self.output.read_text()[-4000:]
        return self.output.read_text()


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes, which are stopped and deleted afterwards. The path is short, because Ray keeps sockets in it."""
    require("ray")
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = Cluster(directory, request.param)
    try:
        cluster.start(0)
        cluster.start(1)
        yield cluster
    finally:
        end(processes_of(str(directory)))
        shutil.rmtree(directory)


def test_ray_train_resumes_after_a_node_loss(cluster: Cluster) -> None:
    """A worker dies, then a node with its disk. With a blank node the run ends with the bits of an undisturbed one."""
    disturbed = Training(cluster, "disturbed", "--die-at", str(EVERY + 1))
    disturbed.wait_for("dies after step", timeout_s=150)
    cluster.lose(1)
    cluster.start(1)
    second = disturbed.wait_for_output(timeout_s=240)
    undisturbed = Training(cluster, "undisturbed").wait_for_output(timeout_s=150)
    ranks = 2 * cluster.workers_each
    assert f"starting at step 0 on {ranks} ranks" in second
    assert f"starting at step {EVERY} on {ranks} ranks" in second
    assert lines(second) == lines(undisturbed)
    summaries = [next(line for line in each.splitlines() if "Ray knows of" in line) for each in (second, undisturbed)]
    assert summaries[0] == summaries[1]
    assert f"Ray knows of step {STEPS}, loss" in summaries[0]
    assert sorted(lines(undisturbed)) == [EVERY, STEPS]
    for node in (0, 1):
        assert findings(LocalStore(cluster.disk(node) / "disturbed")) == []
        assert contents(cluster.disk(node) / "disturbed", STEPS) == contents(cluster.disk(node) / "undisturbed", STEPS)
