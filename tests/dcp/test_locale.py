"""A process whose locale lacks the letters of a name says so, before anything is made."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.agents import HOME

pytestmark = pytest.mark.timeout(120)
CALLS = {
    "root": "ReplicatedWriter(base + '/l\u00e4uf')",
    "save": "dcp.save({'step': 1}, checkpoint_id='l\u00e4uf', storage_writer=ReplicatedWriter(base), no_dist=True)",
    "load": "dcp.load({'step': 1}, checkpoint_id='l\u00e4uf', storage_reader=ReplicatedReader(base), no_dist=True)",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_name_that_cannot_be_encoded_is_refused(tmp_path: Path, call: str) -> None:
    """The error is a typed one, and its hint the way out: UTF-8."""
    code = (
        "import sys; import torch.distributed.checkpoint as dcp; base = sys.argv[1]\n"
        f"from replicated_ckpt import ReplicatedReader, ReplicatedWriter\n{ascii(CALLS[call])[1:-1]}"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(HOME)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "root")],
        env=ascii_only, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "ConfigInvalid" in done.stderr, done.stderr
    assert "encodes names as ascii. Hint: Start Python with PYTHONUTF8=1" in done.stderr
    assert not (tmp_path / "root" / "l\u00e4uf").exists()
