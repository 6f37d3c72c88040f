"""The files of examples/launchers: all are validated, and the Slurm script runs."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from replicated_ckpt.agent.http.greeting import GREETING_DEADLINE_S
from replicated_ckpt.cli.main import parser
from replicated_ckpt.config import DRAIN_S, LEAVE_WITHIN_S
from replicated_ckpt.environment import HOST_ENV
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.agent.checkpoints import findings
from tests.harness.processes import end, processes_of

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"
WITHIN_S = 300
"""For one run of the script: seconds on an idle machine, minutes on a busy one."""
MANIFESTS = sorted(LAUNCHERS.glob("*.yaml"))
KUBERNETES = "1.31"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def containers(path: Path) -> Iterator[dict[str, Any]]:
    for document in documents(path):
        spec = document["spec"].get("template", {}).get("spec", {})
        yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    """Kubernetes' own schemas accept every field."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", [path for path in MANIFESTS if list(containers(path))], ids=lambda path: path.name)
def test_manifests_pass_valid_arguments(path: Path) -> None:
    """The command accepts the agents' arguments. Ranks get the agent's root and its address."""
    found = list(containers(path))
    assert found[-1]["name"] in ("agent", "train")
    for container in found:
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "store"]
        if container["name"] == "agent":
            arguments = parser().parse_args(container["args"][1:])
            assert arguments.root == mount["mountPath"]
            assert arguments.host in {"$(HOST_IP)", "0.0.0.0"}
            (port,) = [port for port in container["ports"] if port["name"] == "agent"]
            assert arguments.port == str(port["containerPort"])
        elif container["name"] == "train":
            assert f"--root={mount['mountPath']}" in container["args"]
            assert HOST_ENV in {variable["name"] for variable in container["env"]}


def test_launchers_wait_as_long_as_an_agent_may_take_to_exit() -> None:
    """After SIGTERM, each launcher waits as long as an agent may take for open saves.

    A pod with ranks and an agent waits for the ranks before that.
    """
    unit = (LAUNCHERS / "replicated-ckpt-agent.service").read_text(encoding="utf-8")
    pods = {
        path.name: document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for path in MANIFESTS
        for document in documents(path)
        if "template" in document["spec"]
    }
    assert f"TimeoutStopSec={LEAVE_WITHIN_S:.0f}\n" in unit
    assert pods["kubernetes-agent.yaml"] == LEAVE_WITHIN_S
    assert pods["kubernetes-sidecar.yaml"] == pods["kubernetes-job.yaml"] + LEAVE_WITHIN_S
    assert DRAIN_S + 2 * GREETING_DEADLINE_S < LEAVE_WITHIN_S


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubernetes-sidecar.yaml"])
def test_ranks_have_a_gpu_each_and_memory_for_what_they_share(name: str) -> None:
    """torchrun starts one process per GPU. /dev/shm has a size limit below the container's memory."""
    (pod,) = pods(LAUNCHERS / name)
    (train,) = pod["containers"]
    limits, requests = train["resources"]["limits"], train["resources"]["requests"]
    assert f"--nproc-per-node={limits['nvidia.com/gpu']}" in train["args"]
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert gibibytes(shm["sizeLimit"]) < gibibytes(requests["memory"]) <= gibibytes(limits["memory"])


@pytest.mark.parametrize("path", [path for path in MANIFESTS if list(containers(path))], ids=lambda path: path.name)
def test_agents_run_where_ranks_do(path: Path) -> None:
    """Agents tolerate the taint of GPU nodes, and request CPU and memory."""
    (pod,) = pods(path)
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    for agent in [container for container in containers(path) if container["name"] == "agent"]:
        assert {"cpu", "memory"} <= agent["resources"]["requests"].keys()


def pods(path: Path) -> list[dict[str, Any]]:
    return [document["spec"]["template"]["spec"] for document in documents(path) if "template" in document["spec"]]


def gibibytes(text: str) -> int:
    return int(text.removesuffix("Gi"))


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    """systemd accepts the unit, and the command accepts its arguments."""
    unit = (LAUNCHERS / "replicated-ckpt-agent.service").read_text(encoding="utf-8")
    (command,) = [line.removeprefix("ExecStart=") for line in unit.splitlines() if line.startswith("ExecStart=")]
    program, *arguments = shlex.split(command)
    parser().parse_args(arguments)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the unit's other lines are unchecked")
    copy = tmp_path / "replicated-ckpt-agent.service"
    copy.write_text(unit.replace(program, "/bin/true"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=30, check=False
    )
    assert copy.name not in done.stderr


def fake_slurm(directory: Path) -> None:
    """Fakes Slurm's commands for two nodes on this machine: `srun` runs its command once per node, each with its own
    root.
    """
    directory.mkdir()
    commands = {
        "srun": (
            "while [[ $1 == --* ]]; do shift; done\n"
            "pids=()\n"
            "trap 'kill \"${pids[@]}\" 2>/dev/null' TERM\n"
            "for SLURM_NODEID in 0 1; do\n"
            '  SLURM_NODEID=$SLURM_NODEID ROOT=$ROOT/node-$SLURM_NODEID "$@" & pids+=($!)\n'
            "done\n"
            'status=0; for pid in "${pids[@]}"; do wait "$pid" || status=$?; done; wait; exit "$status"\n'
        ),
        "scontrol": "echo 127.0.0.1; echo 127.0.0.1\n",
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n',
        "replicated-ckpt": (
            f"exec {shlex.quote(sys.executable)} -c "
            '"import sys; from replicated_ckpt.cli.main import main; sys.exit(main())" "$@"\n'
        ),
    }
    for name, body in commands.items():
        path = directory / name
        path.write_text("#!/bin/bash\n" + body, encoding="utf-8")
        path.chmod(0o755)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(2 * WITHIN_S + 60)
def test_the_slurm_script_trains_and_resumes(tmp_path: Path) -> None:
    """Two nodes train, one loses its store, and the requeued job resumes. Only Slurm's commands are fakes."""
    fake_slurm(tmp_path / "bin")
    store = tmp_path / "ckpt"
    try:
        assert "starting at step 0 on 2 ranks" in trained(environment_of(tmp_path), 2)
        shutil.rmtree(store / "node-1")
        assert "starting at step 2 on 2 ranks" in trained(environment_of(tmp_path), 4)
    finally:
        end(processes_of(str(store)))
    for node in (LocalStore(store / "node-0"), LocalStore(store / "node-1")):
        assert (node.root / "step-4" / ".metadata").exists()
        assert findings(node) == []


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.multiprocess
@pytest.mark.timeout(2 * WITHIN_S + 60)
def test_a_requeued_slurm_job_outlives_a_node(tmp_path: Path) -> None:
    """All processes of one node are killed and its disk is deleted: the job fails, and its next run resumes."""
    fake_slurm(tmp_path / "bin")
    store, output = tmp_path / "ckpt", tmp_path / "said"
    roots = [store / "node-0", store / "node-1"]
    environment = environment_of(tmp_path)
    script = ["bash", str(LAUNCHERS / "slurm.sbatch"), str(ROOT / "examples" / "fashion_mnist.py")]
    options = ["--steps", "100000", "--save-every", "2", "--batch", "2"]
    try:
        with (
            output.open("wb") as log,
            subprocess.Popen([*script, *options], env=environment, stdout=log, stderr=log) as job,
        ):
            wait_for(
                lambda: all(list(root.glob("step-*/.metadata")) for root in roots), WITHIN_S, "a checkpoint on both"
            )
            end(processes_of(str(roots[1])))
            shutil.rmtree(roots[1])
            assert job.wait(WITHIN_S) != 0, output.read_text()
        saved = max(int(path.parent.name.removeprefix("step-")) for path in roots[0].glob("step-*/.metadata"))
        assert f"starting at step {saved} on 2 ranks" in trained(environment_of(tmp_path), saved + 2)
    finally:
        end(processes_of(str(store)))
    for root in roots:
        assert (root / f"step-{saved + 2}" / ".metadata").exists()
        assert findings(LocalStore(root)) == []


RANK = """
import signal, sys, time
from pathlib import Path
from replicated_ckpt.agent.launch import running_agent
from replicated_ckpt.stores.local.store import LocalStore

root = Path(sys.argv[-1])
def on_sigterm(*_):
    time.sleep(2)
    (root / "told").write_text("" if running_agent(LocalStore(root)) is None else "the agent answers")
    sys.exit(0)
signal.signal(signal.SIGTERM, on_sigterm)
while running_agent(LocalStore(root)) is None:
    time.sleep(0.1)
(root / "begun").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_slurm_signals_the_ranks_before_the_agents(tmp_path: Path) -> None:
    """The batch shell gets SIGTERM, as with `B:`. Each rank gets the signal and still has an agent while it saves.

    The shell waits for the agents, because the job ends with the shell, and Slurm would then signal the agents.
    """
    script = LAUNCHERS / "slurm.sbatch"
    assert "#SBATCH --signal=B:TERM@120\n" in script.read_text(encoding="utf-8")
    fake_slurm(tmp_path / "bin")
    store, program = tmp_path / "ckpt", tmp_path / "rank.py"
    program.write_text(RANK, encoding="utf-8")
    environment = environment_of(tmp_path)
    roots = [store / "node-0", store / "node-1"]
    try:
        with subprocess.Popen(["bash", str(script), str(program)], env=environment) as batch:
            wait_for(lambda: all((root / "begun").exists() for root in roots), 90, "the ranks")
            batch.terminate()
            assert batch.wait(60) != 0, "torchrun was ended by a signal"
        assert [(root / "told").read_text() for root in roots] == ["the agent answers"] * 2
        assert not processes_of(str(store))
    finally:
        end(processes_of(str(store)))


def environment_of(folder: Path) -> dict[str, str]:
    """The script's environment under Slurm, with a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ROOT": str(folder / "ckpt"),
        "RANKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "PORT": str(port),
    }


def trained(environment: dict[str, str], steps: int) -> str:
    """Runs the script to its end. Returns its output."""
    command = ["bash", str(LAUNCHERS / "slurm.sbatch"), str(ROOT / "examples" / "fashion_mnist.py")]
    command += ["--steps", str(steps), "--save-every", "2", "--batch", "2"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
