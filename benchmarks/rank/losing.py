"""Ways that can lose a node between a save and a load, while its ranks live on."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol, runtime_checkable

from benchmarks.rank.ways import Ours, is_first_of_node
from tests.harness.processes import end
from tests.steps.context import Context

_AGENT_START_S = 20.0


@runtime_checkable
class Losing(Protocol):
    """`lose` runs on every rank between two barriers. Afterwards the world's last node is blank."""

    def lose(self) -> None: ...


class LosingOurs(Ours):
    """Ours. A lost node gets a running agent on an empty store, like a replaced node."""

    def lose(self) -> None:
        if is_of_last_node(self._context) and is_first_of_node():
            root = self._context.root
            kill_agent(root)
            shutil.rmtree(root)
            root.mkdir()
            start_agent(root)


def is_of_last_node(context: Context) -> bool:
    return context.node == len(context.roots) - 1


def agent_pid(root: Path) -> int | None:
    try:
        return int(json.loads((root / ".agent" / "endpoint.json").read_text())["pid"])
    except FileNotFoundError:
        return None


def kill_agent(root: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid := agent_pid(root):
            end([pid])


def start_agent(root: Path) -> None:
    """Starts an agent and waits until it serves. It exits a minute after its last client."""
    command = [sys.executable, "-m", "replicated_ckpt.agent", "--root", str(root), "--idle-exit-s", "60"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + _AGENT_START_S
    while agent_pid(root) != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the agent of {root} did not start")
        time.sleep(0.01)
