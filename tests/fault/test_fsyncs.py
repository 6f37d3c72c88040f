"""How many fsyncs a save makes, counted with strace. Each fsync waits for the disk."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fault.power_loss.strace import HOME, seen_below

pytestmark = [pytest.mark.fault, pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")]
SAVES = {"first": ("step-1", 5, 12), "later": ("step-2", 4, 8), "overwrite": ("step-2", 4, 9)}
"""By kind: the checkpoint, and the limits for fsyncs of files and of directories, the root's parent included."""
JOB = """
import sys, warnings
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from replicated_ckpt import ReplicatedWriter
warnings.simplefilter("ignore")
base = Path(sys.argv[1])
for word in sys.argv[2:]:
    kind, checkpoint_id = word.split(":")
    (base / kind).mkdir()
    writer = ReplicatedWriter(base / "node", copies=1, overwrite=kind == "overwrite")
    dcp.save({"w": torch.zeros(1000)}, checkpoint_id=checkpoint_id, storage_writer=writer, no_dist=True)
"""


def test_a_save_of_one_rank_makes_few_fsyncs(tmp_path: Path) -> None:
    """A first save, a later one under a new id, and an overwrite of that one stay within their limits."""
    base, log = tmp_path / "base", tmp_path / "strace.log"
    base.mkdir()
    command = ["strace", "-f", "-y", "-s", "0", "-e", "trace=mkdir,fsync,fdatasync,sync_file_range,syncfs,sync"]
    command += ["-e", "signal=none", "-o", str(log), sys.executable, "-c", JOB, str(base)]
    command += [f"{kind}:{checkpoint_id}" for kind, (checkpoint_id, _, _) in SAVES.items()]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: dict[str, Counter[bool]] = {}
    counted = Counter[bool]()
    for call, path, *_ in seen_below(base, log.read_text()):
        if call == "mkdir" and path in SAVES:
            counts[path] = counted = Counter()
        elif call != "mkdir":
            counted[is_directory(path)] += 1
    found = {kind: (counted[False], counted[True]) for kind, counted in counts.items()}
    most = {kind: (files, directories) for kind, (_, files, directories) in SAVES.items()}
    assert all(pair <= limit for kind in SAVES for pair, limit in zip(found[kind], most[kind], strict=True)), found


def is_directory(path: str) -> bool:
    """Whether the path was a directory: every file is written under a temporary name with an ending."""
    return not path.endswith((".tmp", ".part"))
