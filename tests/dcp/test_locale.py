"""The locale's encoding lacks characters of a name: the error states so, before anything is created."""

import json
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
EACH_CALL = """
import json, sys, traceback
import torch.distributed.checkpoint as dcp
from replicated_ckpt import ReplicatedReader, ReplicatedWriter
base, said = sys.argv[1], {}
for name, call in json.loads(sys.argv[2]).items():
    try:
        exec(call)
    except BaseException:  # CheckpointException is no subclass of Exception
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""


def test_a_name_that_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    """A writer, a save and a load raise ConfigInvalid, with the hint to run Python in UTF-8 mode."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(HOME)}
    done = subprocess.run(
        [sys.executable, "-c", EACH_CALL, str(tmp_path / "root"), json.dumps(CALLS)],
        env=ascii_only, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert said.keys() == CALLS.keys()
    for name, text in said.items():
        assert "ConfigInvalid" in text, name
        assert "encodes names as ascii. Hint: Start Python with PYTHONUTF8=1" in text, name
    assert not (tmp_path / "root" / "l\u00e4uf").exists()
