"""The smallest complete drill: two nodes of one rank. One is killed, and a blank node takes its place."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.drill import processes
from tests.marks import mark_long

COMMAND = (sys.executable, "-c", "import sys; from replicated_ckpt.cli.main import main; sys.exit(main())", "drill")
START_LIMIT_S = 60


def processes_in(workdir: Path) -> list[int]:
    """Processes that a drill started for this work directory."""
    needle = str(workdir).encode()
    found = []
    for pid in processes.find_processes(""):
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.long  # `.ci/run` and the workflow run the same drill as a separate step
@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_a_node_dies_and_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """The new node's rank gets its bytes from the survivor, every tensor is equal, and no process remains."""
    workdir = tmp_path / "work"
    command = [*COMMAND, "--scenario", "replace", "--ranks-per-node", "1", "-o", "json"]
    command += ["--steps", "3", "--workdir", str(workdir), "--keep"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == ExitCode.OK, ended.stderr + ended.stdout
    result = json.loads(ended.stdout)
    assert result["held"] is True
    (line,) = result["scenarios"]
    assert (line["ranks_before"], line["ranks_after"], line["shards_lost"], line["shards"]) == (2, 2, 2, 4)
    assert line["tensors_verified"] > 20
    assert line["bytes_peer"] > 0
    assert (workdir / "run-1" / "node-0" / "step-2" / ".metadata").exists()
    assert processes_in(workdir) == []


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_a_whole_cluster_dies_and_comes_back_from_its_bucket(tmp_path: Path) -> None:
    """Two nodes of one rank are killed and deleted. Two blank nodes of two ranks load every tensor as it was saved."""
    pytest.importorskip("moto")
    workdir = tmp_path / "work"
    command = [*COMMAND, "--scenario", "cluster", "--object-store", "moto", "--ranks-per-node", "1", "-o", "json"]
    command += ["--steps", "3", "--workdir", str(workdir), "--keep"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == ExitCode.OK, ended.stderr + ended.stdout
    result = json.loads(ended.stdout)
    assert (result["held"], result["skipped"]) == (True, {})
    assert result["object_store"].startswith("moto ")
    (line,) = result["scenarios"]
    assert (line["ranks_before"], line["ranks_after"], line["shards_lost"], line["shards"]) == (2, 4, 4, 4)
    assert line["tensors_verified"] > 20
    assert (line["bytes_local"], line["bytes_peer"]) == (0, 0)
    assert line["bytes_object"] > 0
    assert line["wait_s"] is not None
    assert not list((workdir / "run-1").glob("node-*/step-*"))
    assert processes_in(workdir) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "number", mark_long([signal.SIGINT, signal.SIGTERM], keep=[signal.SIGINT]), ids=lambda number: number.name
)
def test_an_interrupted_drill_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A signal ends every process and removes the work directory."""
    workdir = tmp_path / "work"
    # a test run in the background ignores SIGINT, and its children would inherit that
    was = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        command = [*COMMAND, "--workdir", str(workdir)]
        drill = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, was)
    deadline = time.monotonic() + START_LIMIT_S
    while not processes_in(workdir) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(workdir)
    drill.send_signal(number)
    _, errors = drill.communicate(timeout=START_LIMIT_S)
    assert drill.returncode == ExitCode.INTERRUPTED, errors.decode()
    assert processes_in(workdir) == []
    assert not workdir.exists()
