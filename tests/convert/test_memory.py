"""Conversions hold a window in memory, not a model and not a tensor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCRIPT = """
import shutil
import sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from replicated_ckpt import ReplicatedWriter, export_checkpoint, import_checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

formats, base, way = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
import replicated_ckpt.dcp.convert.importing  # everything that is imported is there before
dcp.save({"a": torch.ones(9)}, checkpoint_id=formats, storage_writer=ReplicatedWriter(base / "other", copies=1))
before = peak()
for format_ in formats.split(","):
    export_checkpoint("step-1", base / format_, format=format_, root=base / "root")
    if way == "back":
        import_checkpoint(base / format_, format_, format=format_, root=base / "root", copies=1)
    shutil.rmtree(base / format_) if (base / format_).is_dir() else (base / format_).unlink()
    shutil.rmtree(base / "root" / format_, ignore_errors=True)
print(before, peak())
"""


def save(base: Path, rows: int, tensors: int) -> None:
    state = {f"w{n}": torch.full((rows, 1_000_000), n, dtype=torch.int8) for n in range(tensors)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(base / "root", copies=1), no_dist=True)


def peaks(formats: str, base: Path, way: str, timeout_s: float) -> tuple[int, int]:
    """Peak memory of a process that converts, in bytes: when everything was imported, and at its end."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, formats, str(base), way]
    done = subprocess.run(command, check=True, timeout=timeout_s, stdout=subprocess.PIPE, env={**os.environ})
    before, after = done.stdout.split()
    return int(before), int(after)


def test_a_tensor_larger_than_the_window_is_never_in_memory(tmp_path: Path) -> None:
    """One of 200 MB in each format and back: less than 150 MB more than the imports take."""
    save(tmp_path, 200, 1)
    before, after = peaks("torch,safetensors,dcp", tmp_path, "back", timeout_s=110)
    assert after - before < 150e6


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(900)
def test_two_gigabytes_take_less_than_600_mb(tmp_path: Path) -> None:
    """All of the process, torch included, for each format and back."""
    save(tmp_path, 500, 4)
    for format_ in ("torch", "safetensors", "dcp"):
        _, after = peaks(format_, tmp_path, "back", timeout_s=300)
        assert after < 600e6
