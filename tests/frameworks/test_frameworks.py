"""The examples of other frameworks, on two real nodes: stopped, one lost, resumed, and held against an undisturbed run."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from replicated_ckpt.stores.local import LocalStore
from tests.agent.checkpoints import findings
from tests.multiprocess.processes import end, processes_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
STEPS = 8
EVERY = 4

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: make frameworks")


def run(script: str, roots: list[Path], steps: int, *arguments: str) -> str:
    """Runs an example under torchrun, one rank on each node, to its end; what its ranks printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = []
    try:
        for index, root in enumerate(roots):
            command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(len(roots))]
            command += ["--node-rank", str(index), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
            command += ["--master-port", str(port), str(EXAMPLES / script), "--root", str(root)]
            command += ["--steps", str(steps), "--save-every", str(EVERY), *arguments]
            output = (root.parent / f"{root.name}.out").open("w+")
            nodes.append((subprocess.Popen(command, stdout=output, stderr=output, env=environment), output))
        for process, output in nodes:
            process.wait(120)
            output.seek(0)
            assert process.returncode == 0, output.read()[-4000:]
    finally:
        for process, _ in nodes:
            process.kill()
            process.wait()
    texts = [(root.parent / f"{root.name}.out").read_text() for root in roots]
    for _, output in nodes:
        output.close()
    return texts[0]


def lines(said: str) -> dict[int, str]:
    """What was said of each saved step."""
    return {int(match[1]): match[2] for match in re.finditer(r"^step (\d+): (.*)$", said, flags=re.MULTILINE)}


@pytest.mark.parametrize(
    ("module", "script"),
    [
        ("accelerate", "accelerate_fsdp2.py"),
        ("transformers", "hf_trainer.py"),
        ("lightning", "lightning_callback.py"),
        ("torch", "torchtitan_style.py"),
    ],
)
def test_it_goes_on_after_the_loss_of_a_node(tmp_path: Path, module: str, script: str) -> None:
    """Half way a node's store is deleted; what the resumed run says of its later steps is what an undisturbed one says."""
    require(module)
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    try:
        first = run(script, nodes, EVERY)
        shutil.rmtree(nodes[1])
        second = run(script, nodes, STEPS)
        undisturbed = run(script, [tmp_path / "whole-0", tmp_path / "whole-1"], STEPS)
    finally:
        end(processes_of(str(tmp_path)))
    assert "starting at step 0 on 2 ranks" in first
    assert f"starting at step {EVERY} on 2 ranks" in second
    assert {**lines(first), **lines(second)} == lines(undisturbed)
    assert sorted(lines(undisturbed)) == [EVERY, STEPS]
    for node in nodes:
        assert (node / f"step-{STEPS}" / ".metadata").exists()
        assert findings(LocalStore(node)) == []


def test_ray_train_survives_a_worker(tmp_path: Path) -> None:
    """A worker dies; Ray makes the group anew, and it goes on from the newest checkpoint."""
    require("ray")
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "ray_train.py"), "--root", str(tmp_path / "root")]
    command += ["--steps", str(STEPS), "--save-every", str(EVERY), "--die-at", str(EVERY + 1)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=500,
            check=False,
        )
    finally:
        end(processes_of(str(tmp_path)))
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"starting at step {EVERY} on 2 ranks" in done.stdout
    assert f"ended at step {STEPS}" in done.stdout
    assert findings(LocalStore(tmp_path / "root")) == []
