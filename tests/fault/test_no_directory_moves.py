"""Versions never move: no save, overwrite, load, removal, retention, repair or agent start renames a directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.fault.power_loss.strace import HOME, seen_below

pytestmark = [pytest.mark.fault, pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")]
TRACE = "trace=rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,fork,vfork,clone,clone3,execve"
JOB = """
import subprocess, sys, time, warnings
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from replicated_ckpt import ReplicatedReader, ReplicatedWriter, Retention
warnings.simplefilter("ignore")
root = Path(sys.argv[1])
agent = [sys.executable, "-m", "replicated_ckpt.agent", "--root", str(root), "--round-every-s", "1", "--host", "127.0.0.1"]

def command(*words):
    return subprocess.run([sys.executable, "-m", "replicated_ckpt", *words, "--root", str(root)], timeout=60).returncode

def until(true):
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    assert true()

def start():
    process = subprocess.Popen(agent)
    until((root / ".agent" / "endpoint.json").exists)
    return process

root.mkdir()
process = start()
try:
    for number, name in enumerate(["step-1", "step-2", "step-3", "step-3", "step-4"]):
        if number == 3:
            (root / name / "tokenizer").mkdir()
            (root / name / "tokenizer" / "vocab.txt").write_text("words")
        writer = ReplicatedWriter(root, copies=1, retention=Retention(keep_last=3))
        dcp.save({"w": torch.full((1000,), float(number))}, checkpoint_id=name, storage_writer=writer, no_dist=True)
    until(lambda: not (root / "step-1").exists())
    state = {"w": torch.zeros(1000)}
    dcp.load(state, checkpoint_id="step-3", storage_reader=ReplicatedReader(root), no_dist=True)
    assert state["w"][0] == 3
    assert command("rm", "step-2") == 0
    (root / "step-4" / "__9_9.distcp").write_bytes(b"of no version")
    assert command("repair") == 0
    assert not (root / "step-4" / "__9_9.distcp").exists()
    process.terminate()
    process.wait(60)
    process = start()
    assert command("status") in (0, 1)
finally:
    process.terminate()
    process.wait(60)
"""


def test_no_directory_is_renamed_and_no_file_of_a_user_is_touched(tmp_path: Path) -> None:
    """strace records one operation of each kind, in the trainer, the agents and the commands."""
    root, log = tmp_path / "node", tmp_path / "strace.log"
    command = [
        "strace",
        "-f",
        "-y",
        "-s",
        "0",
        "-e",
        TRACE,
        "-e",
        "signal=none",
        "-o",
        str(log),
        sys.executable,
        "-c",
        JOB,
    ]
    environment = {**os.environ, "PYTHONPATH": str(HOME), "REPLICATED_CKPT_AGENT_IDLE_S": "5"}
    done = subprocess.run(
        [*command, str(root)], env=environment, cwd="/", capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = list(seen_below(root, log.read_text()))
    renamed = [call for call in calls if call[0] in ("rename", "exchange")]
    assert {Path(call[2]).name for call in renamed} >= {".manifest.json", ".metadata"}, "strace missed the commits"
    assert any(Path(call[2]).name.startswith(".gone.") for call in renamed), "strace missed the removals"
    assert [call for call in renamed if any(map(is_directory_of_ours, call[1:3]))] == []
    assert [call for call in calls if "tokenizer" in str(call)] == []
    assert (root / "step-3" / "tokenizer" / "vocab.txt").read_text() == "words"
    assert findings(LocalStore(root)) == []


def is_directory_of_ours(path: str) -> bool:
    """Whether the path is a checkpoint's directory, a staging directory or the agent's, now or in an older layout."""
    name = Path(path).name
    return (
        re.fullmatch(r"step-[0-9]|[0-9a-f]{32}|\.(staging|trash|replaced|agent)", name) is not None
        and name != ".metadata"
    )
