"""Runs the framework examples under torchrun on two nodes of this machine, and reads what the tests compare."""

import importlib.util
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
STEPS = 8
EVERY = 4


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: make frameworks")


def run(script: str, roots: list[Path], steps: int, *, ranks: int = 1) -> str:
    """Runs an example under torchrun to its end, with `ranks` ranks per node. Returns the first node's output."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    try:
        for index, root in enumerate(roots):
            command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(len(roots))]
            command += ["--node-rank", str(index), "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
            command += ["--master-port", str(port), str(EXAMPLES / script), "--root", str(root)]
            command += ["--steps", str(steps), "--save-every", str(EVERY)]
            output = (root.parent / f"{root.name}.out").open("w+")
            nodes.append((subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT), output))
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


def lines(output: str) -> dict[int, str]:
    """What the output contains about each saved step."""
    return {int(match[1]): match[2] for match in re.finditer(r"\bstep (\d+): (.*)$", output, flags=re.MULTILINE)}


def contents(root: Path, step: int) -> dict[tuple[str, str, object], object]:
    """Each item of a checkpoint by name and place; a tensor as its bytes, because its serialised form may differ.

    State that belongs to one rank is left out, because it contains clocks.
    """
    (checkpoint,) = (path.parent for path in root.glob(f"*[-=]{step}*/.metadata"))
    items = {}
    for index, where in FileSystemReader(checkpoint).read_metadata().storage_data.items():
        if index.fqn == "first" or index.fqn.startswith("rank."):
            continue
        raw = (checkpoint / where.relative_path).read_bytes()[where.offset :][: where.length]
        item = torch.load(io.BytesIO(raw), weights_only=True)
        value = (item.dtype, item.shape, item.numpy().tobytes()) if isinstance(item, torch.Tensor) else item
        items[index.fqn, where.relative_path, index.offset] = value
    return items
