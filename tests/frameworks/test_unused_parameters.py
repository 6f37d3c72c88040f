"""Parameters without a gradient so far, and frozen ones, over a restart in each framework."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.jobs import PROGRAMS
from tests.frameworks.running import ENVIRONMENT, require
from tests.harness.processes import end, processes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_unused_and_frozen_heads_resume(tmp_path: Path, framework: str) -> None:
    """An unused head has no optimizer state, a frozen one keeps its state. The weights end as without a restart."""
    require(framework)
    command = [sys.executable, "-W", "ignore", str(PROGRAMS / "unused_program.py"), framework, str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=280, check=False)
    finally:
        end(processes_of(str(tmp_path)))
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "result.json").read_text()) == {"found": ["paused", "used"], "same": True}
