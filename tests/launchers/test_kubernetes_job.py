"""The jobs of the Kubernetes manifests under kills: their pods are processes of this machine, with the manifests'
arguments.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import end, processes_of
from tests.launchers.test_launchers import LAUNCHERS, ROOT, containers, documents

JOBS = ("kubernetes-job.yaml", "kubernetes-sidecar.yaml")
RESTARTS_MAX = 20
"""As the manifests' backoffLimit."""
WITHIN_S = 300


def arguments_of(manifest: str) -> list[str]:
    container = training(manifest)
    assert container["command"] == ["torchrun"]
    found: list[str] = container["args"]
    return found


def variables_of(manifest: str) -> dict[str, str]:
    """The environment variables to which the manifest gives a value."""
    return {each["name"]: each["value"] for each in training(manifest)["env"] if "value" in each}


def training(manifest: str) -> dict[str, Any]:
    (container,) = [each for each in containers(LAUNCHERS / manifest) if each["name"] == "train"]
    return container


class Pod:
    """One pod of the job on its own node. Restarts the container when it fails, as kubelet does."""

    def __init__(self, folder: Path, index: int, port: int) -> None:
        self.root = folder / f"node-{index}"
        self.log = folder / f"pod-{index}.log"
        self.is_complete = False
        changes = {"--nnodes=4": "--nnodes=2", "--nproc-per-node=8": "--nproc-per-node=1"}
        changes["--rdzv-endpoint=train-0.train:29500"] = f"--rdzv-endpoint=127.0.0.1:{port}"
        changes["--root=/nvme/ckpt"] = f"--root={self.root}"
        given = arguments_of(JOBS[0])
        assert changes.keys() <= set(given)
        words = [changes.get(word, word) for word in given]
        self._command = [sys.executable, "-m", "torch.distributed.run", *words, "--steps=120", "--save-every=20"]
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._is_over = False

    def start(self) -> None:
        self._thread.start()

    def _keep_running(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= variables_of(JOBS[0]) | {
            "REPLICATED_CKPT_HOST": "127.0.0.1",
            "REPLICATED_CKPT_AGENT_IDLE_S": "5",
        }
        for _ in range(RESTARTS_MAX + 1):
            with self.log.open("ab") as log:
                process = subprocess.Popen(self._command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            if process.wait() == 0:
                self.is_complete = True
                return
            if self._is_over:
                return
            time.sleep(1)

    def lose(self) -> None:
        """The node is lost with its disk: all processes are killed. The next node is blank."""
        end(processes_of(str(self.root)))
        shutil.rmtree(self.root, ignore_errors=True)

    def stop(self) -> None:
        self._is_over = True
        while self._thread.is_alive():
            end(processes_of(str(self.root)))
            self._thread.join(0.2)
        end(processes_of(str(self.root)))

    def steps(self) -> list[int]:
        """The committed steps on this node."""
        return [int(path.parent.name.removeprefix("step-")) for path in self.root.glob("step-*/.metadata")]


@contextmanager
def running_job(folder: Path) -> Iterator[tuple[Pod, Pod]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = Pod(folder, 0, port), Pod(folder, 1, port)
    try:
        pods[0].start()
        wait_until(lambda: is_open(port), "the rendezvous of pod 0")
        pods[1].start()
        yield pods
    finally:
        for pod in pods:
            pod.stop()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {WITHIN_S} s"
        time.sleep(0.1)


def test_both_jobs_start_their_ranks_in_the_same_way() -> None:
    """The tests below therefore hold for both manifests."""
    assert arguments_of(JOBS[0]) == arguments_of(JOBS[1])
    assert variables_of(JOBS[0]) == variables_of(JOBS[1])


@pytest.mark.parametrize("manifest", ["kubernetes-agent.yaml", "kubernetes-sidecar.yaml"])
def test_the_store_is_owned_by_the_user_of_the_pod(manifest: str, tmp_path: Path) -> None:
    """kubelet creates the directory for root. The init container gives it to the pod's user before the agent starts."""
    (pod,) = [
        each["spec"]["template"]["spec"] for each in documents(LAUNCHERS / manifest) if "template" in each["spec"]
    ]
    first, *_ = pod["initContainers"]
    assert first["securityContext"]["runAsUser"] == 0
    if os.geteuid() != 0:
        pytest.skip("only root changes the owner of a directory")
    path = tmp_path / "ckpt"
    path.mkdir(mode=0o755)
    mount = first["volumeMounts"][0]["mountPath"]
    subprocess.run([str(path) if word == mount else word for word in first["command"]], check=True, timeout=30)
    assert (path.stat().st_uid, path.stat().st_gid) == (
        pod["securityContext"]["runAsUser"],
        pod["securityContext"]["runAsGroup"],
    )


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_job_outlives_the_loss_of_any_pod(tmp_path: Path) -> None:
    """A pod is lost with its node's disk, later the pod of the rendezvous: the job resumes both times."""
    with running_job(tmp_path) as (first, second):
        for lost in (second, first):
            wait_for_progress((first, second), beyond=max(newest(first), newest(second)))
            lost.lose()
        wait_until(lambda: first.is_complete and second.is_complete, "the end of the job")
        assert newest(first) == newest(second) == 120
        logs = (tmp_path / "pod-0.log").read_text() + (tmp_path / "pod-1.log").read_text()
        assert logs.count("starting at step 0 ") <= 2, "the job started from step 0 again"


def wait_for_progress(pods: tuple[Pod, Pod], *, beyond: int) -> None:
    wait_until(lambda: min(map(newest, pods)) > beyond, f"a checkpoint after step {beyond} on both nodes")


def newest(pod: Pod) -> int:
    return max(pod.steps(), default=0)
