"""A supervised agent that waits for the agent that ranks have started logs that it waits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.agents import HOME, running_agent

pytestmark = pytest.mark.timeout(60)


def test_a_waiting_agent_logs_the_pid_of_the_other(tmp_path: Path) -> None:
    """The log line has the pid of the other agent. If that agent is stopped, the line says so, with the command that
    continues it.
    """
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
