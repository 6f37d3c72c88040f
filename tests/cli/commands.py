"""Runs the real command line, as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.agent.agents import HOME

MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a test run may ignore it
    "from replicated_ckpt.cli.main import main; sys.exit(main())"
)
AS_USER = "import os, sys; from replicated_ckpt.cli.main import main, parser; parser(); os.setuid({}); sys.exit(main())"
"""All is imported before, as another user may not read where it lies."""


def command(*arguments: str | Path, user: int | None = None, idle_s: int = 1) -> "subprocess.CompletedProcess[str]":
    """An agent that it starts leaves after `idle_s` without work."""
    environment = {**os.environ, "PYTHONPATH": str(HOME), "REPLICATED_CKPT_AGENT_IDLE_S": str(idle_s)}
    whole = [sys.executable, "-c", MAIN if user is None else AS_USER.format(user), *map(str, arguments)]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=90, check=False, cwd="/")


def as_json(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = command(*arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
