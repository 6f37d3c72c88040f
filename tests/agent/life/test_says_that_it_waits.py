"""An agent that is to stay, and waits for the one that ranks have started, says so: else it looks like one that hangs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.agents import HOME, running_agent

pytestmark = pytest.mark.timeout(60)


def test_it_names_the_process_that_it_waits_for(tmp_path: Path) -> None:
    """And that it is stopped, if it is, with the way out."""
    with running_agent(tmp_path, "--idle-exit-s", "600") as other:
        other.signal(signal.SIGSTOP)
        waiting = subprocess.Popen(
            [sys.executable, "-m", "replicated_ckpt.agent", "--root", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(HOME)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert waiting.stderr is not None
            line = next(line for line in waiting.stderr if " WARNING " in line)
        finally:
            waiting.kill()
            waiting.communicate(timeout=10)
    assert f"waits for the agent that ranks started for {tmp_path} (process {other.process.pid})" in line
    assert f"it is stopped: `kill -CONT {other.process.pid}`" in line
