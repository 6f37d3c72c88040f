"""The environment of an agent that a rank starts: a fixed set of variables, the rank's package, and none of the user's
paths.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastcrc
import pytest

import replicated_ckpt
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.core.layout import AGENT_DIR
from replicated_ckpt.version import __version__
from tests.agent.agents import HOME, stop_agent, wait_for
from tests.harness.processes import is_running

PACKAGE = Path(replicated_ckpt.__file__).parent
RANK = """
import json, sys
from pathlib import Path
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.stores.local.store import LocalStore
endpoint = ensure_agent(LocalStore(sys.argv[1]), "127.0.0.1")
environment = Path(f"/proc/{endpoint.pid}/environ").read_bytes().decode().split(chr(0))
maps = Path(f"/proc/{endpoint.pid}/cmdline").read_bytes().decode().split(chr(0))
print(json.dumps([endpoint.version, [entry.partition("=")[0] for entry in environment if entry], maps]))
"""


def start_agent_by_rank(
    root: Path, environment: Mapping[str, str], python: str = sys.executable
) -> tuple[str, list[str]]:
    """The version of the agent that a rank with this environment starts, and the names of the agent's variables.

    In the rank, each warning is an error.
    """
    usual = {"PATH": os.environ["PATH"], "HOME": str(root.parent), "REPLICATED_CKPT_AGENT_IDLE_S": "5"}
    usual["PYTHONWARNINGS"] = "error"
    done = subprocess.run(
        [python, "-c", RANK, str(root)],
        env={**usual, **environment}, cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found: list[Any] = json.loads(done.stdout)
    stop_agent(root)
    return found[0], found[1]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when any Python imports them."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in ("sitecustomize", "usercustomize", "cryptography"):
        code = f"with open({str(tmp_path / 'ran')!r}, 'a') as ran:\n    ran.write('{name} ')\n"
        (folder / f"{name}.py").write_text(code)
    return folder


def test_an_agent_gets_exactly_the_variables_that_it_needs(tmp_path: Path) -> None:
    """The agent gets the paths of bucket credentials. Credentials in variables, Python paths and libraries are not
    passed on.
    """
    kept = {
        "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TMPDIR": "/tmp", "REPLICATED_CKPT_AGENT_LOST_AFTER_S": "7",
        "AWS_SHARED_CREDENTIALS_FILE": "/x", "AWS_ROLE_ARN": "x", "AWS_WEB_IDENTITY_TOKEN_FILE": "/x",
    }  # fmt: skip
    left = {
        "PYTHONPATH": str(HOME), "PYTHONSTARTUP": "/x", "PYTHONHASHSEED": "0", "LD_AUDIT": "", "AWS_PROFILE": "x",
        "AWS_SECRET_ACCESS_KEY": "x" * 20, "MASTER_ADDR": "x", "RANK": "0", "SSH_AUTH_SOCK": "/x",
    }  # fmt: skip
    _, names = start_agent_by_rank(tmp_path / "root", {**kept, **left})
    assert sorted(names) == sorted([*kept, "PATH", "HOME", "REPLICATED_CKPT_AGENT_IDLE_S"])


def test_nothing_on_the_ranks_path_runs_in_the_agent(tmp_path: Path, planted: Path) -> None:
    """A module in the user's PYTHONPATH runs in the rank only."""
    start_agent_by_rank(tmp_path / "root", {"PYTHONPATH": f"{planted}:{HOME}"})
    assert (tmp_path / "ran").read_text() == "sitecustomize "  # by the rank, which shows that the mark works


def test_the_agent_runs_the_package_of_the_rank(tmp_path: Path, planted: Path) -> None:
    """With two versions of the package on one host, the agent runs the version of the rank."""
    shutil.copytree(PACKAGE, planted / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    version = planted / PACKAGE.name / "version.py"
    version.write_text(version.read_text().replace(__version__, "99.1.0"))
    found, _ = start_agent_by_rank(tmp_path / "root", {"PYTHONPATH": str(planted)})
    assert found == "99.1.0"
    assert (tmp_path / "ran").read_text() == "sitecustomize "


def test_the_agent_finds_the_dependencies_of_its_rank(tmp_path: Path) -> None:
    """The agent finds the dependencies of the package even where only PYTHONPATH leads to them."""
    bare = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    needs = Path(fastcrc.__file__).parents[1]
    missing = subprocess.run([bare, "-I", "-c", "import fastcrc"], capture_output=True, timeout=60, check=False)
    if not bare.exists() or missing.returncode == 0:
        pytest.skip("no Python here without the package's needs")
    found, _ = start_agent_by_rank(tmp_path / "root", {"PYTHONPATH": f"{HOME}:{needs}"}, str(bare))
    assert found == __version__


@pytest.mark.parametrize("mode", ["0", "1"])
def test_the_agent_has_the_utf8_mode_of_its_rank(mode: str) -> None:
    """The agent has the UTF-8 mode of its rank, although an isolated Python ignores PYTHONUTF8."""
    asked = "import json; from replicated_ckpt.agent.launch import isolated_python as python"
    environment = {"PYTHONPATH": str(HOME), "PYTHONUTF8": mode, "LC_ALL": "C.UTF-8"}
    rank = [sys.executable, "-c", f"{asked}; print(json.dumps(python()))"]
    agent = json.loads(subprocess.run(rank, env=environment, capture_output=True, timeout=60, check=True).stdout)
    options = agent[: agent.index(next(word for word in agent if word.endswith("isolated.py")))]
    command = [*options, "-c", "import sys; print(sys.flags.utf8_mode)"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == mode


@pytest.mark.parametrize("python", ["''", "None", "'/no/such/python'", "'/bin/true'", "'/bin/false'"])
def test_a_rank_without_a_python_executable_raises(tmp_path: Path, python: str) -> None:
    """`sys.executable` is missing or wrong, as in an embedding program: the error says so, with the command to start an
    agent.
    """
    code = f"import sys; sys.executable = {python}\n{RANK}"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HOME)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "root")],
        env=environment, cwd="/", capture_output=True, text=True, timeout=15, check=False,
    )  # fmt: skip
    assert f"could not be started with this process's Python, {python}" in done.stderr
    assert f"replicated-ckpt agent --root {tmp_path / 'root'}" in done.stderr


def test_an_agent_unblocks_the_signals_that_its_rank_blocks(tmp_path: Path) -> None:
    """A child inherits blocked signals: SIGTERM ends the agent all the same."""
    code = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n{RANK}"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HOME), "REPLICATED_CKPT_AGENT_IDLE_S": "60"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "root")], env=environment, timeout=60, check=True)
    endpoint = read_endpoint(tmp_path / "root" / AGENT_DIR)
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGTERM)
    try:
        wait_for(lambda: not is_running(endpoint.pid), 20, "the end of the agent")
    finally:
        if is_running(endpoint.pid):
            os.kill(endpoint.pid, signal.SIGKILL)
