"""Failpoints: an armed failpoint acts at its place only, and otherwise nothing happens."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.errors import ConfigInvalid

HOME = Path(__file__).resolve().parents[2]
PACKAGE = HOME / "replicated_ckpt"


def ran(armed: str, *reached: str) -> "subprocess.CompletedProcess[str]":
    """A process that arms failpoints from its environment, reaches these points, and prints the name of each one that
    it passes.
    """
    code = "import sys\nfrom replicated_ckpt.failpoints import reach\n"
    code += "for name in sys.argv[1:]:\n    reach(name)\n    print(name, flush=True)\n"
    environment = {**os.environ, "PYTHONPATH": str(HOME), failpoints.ENV: armed}
    command = [sys.executable, "-c", code, *reached]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def test_a_process_is_killed_at_the_armed_failpoint() -> None:
    """`kill@2` ends the process with SIGKILL when it reaches the named failpoint for the second time, and not before."""
    done = ran("commit.named=kill@2", "commit.checked", "commit.named", "commit.durable", "commit.named", "commit.done")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["commit.checked", "commit.named", "commit.durable"]


def test_a_failpoint_raises_no_error_of_the_package() -> None:
    """`raise` simulates a defect, so no handler for the package's own errors may catch its exception."""
    with (
        failpoints.arm("commit.named", failpoints._action("raise")),
        pytest.raises(failpoints.FailpointReached, match=r"commit\.named"),
    ):
        failpoints.reach("commit.named")
    failpoints.reach("commit.named")


@pytest.mark.parametrize("text", ["no.such=kill", "commit.named=explode", "commit.named"])
def test_an_invalid_arming_is_refused(text: str) -> None:
    """A misspelt failpoint raises an error. Otherwise a test would pass because nothing happened."""
    with pytest.raises(ConfigInvalid, match=failpoints.ENV):
        failpoints.arm_from_environment(text)


def test_every_failpoint_is_in_the_code() -> None:
    """The package reaches each failpoint of the registry."""
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in failpoints.POINTS:
        assert f'reach("{name}")' in source, name
