"""Runs the real command line in a process of its own, forked from one that has imported the package."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.agent.agents import HOME
from tests.harness.forked import run_command
from tests.harness.zygote import the_light_zygote

MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a test run may ignore it
    "from replicated_ckpt.cli.main import main; sys.exit(main())"
)


def command(*arguments: str | Path, user: int | None = None, idle_s: int = 1) -> "subprocess.CompletedProcess[str]":
    """Runs a command. An agent that the command starts exits after `idle_s` without work."""
    environment = {**os.environ, "PYTHONPATH": str(HOME), "REPLICATED_CKPT_AGENT_IDLE_S": str(idle_s)}
    words = [*map(str, arguments)]
    return run_command(the_light_zygote().path, words, environment=environment, timeout_s=90, user=user)


def as_json(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = command(*arguments, "-o", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
