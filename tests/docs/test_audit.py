"""`make audit` reports vulnerabilities, and never reports success if the package index gave no answer."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD: dict[str, Any] = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "description": "..."}]}
SKIPPED = {"name": "skipped", "skip_reason": "Dependency not found on PyPI and could not be audited: skipped (1)"}


def audited(folder: Path, answer: str) -> tuple[int, str]:
    """Exit code and output of the tool, with a fake pip-audit that prints `answer`."""
    (folder / "python").symlink_to(sys.executable)
    tool = folder / "pip-audit"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    command = [str(folder / "python"), str(ROOT / "tools" / "audit.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("dependencies", "code", "message"),
    [
        ([GOOD, GOOD], 0, "2 of 2 pinned packages were looked up, 0 vulnerabilities"),
        ([GOOD, BAD], 1, "bad 2: PYSEC-1, fixed in 3"),
        ([SKIPPED, SKIPPED], 2, "0 of 2 pinned packages were looked up"),
        ([GOOD, SKIPPED], 2, "Nothing is known about the other 1, as the package index has no answer: skipped"),
        ([BAD, SKIPPED], 1, "Nothing is known about the other 1"),
    ],
)
def test_the_exit_code_follows_the_answer(tmp_path: Path, dependencies: list[Any], code: int, message: str) -> None:
    """Exit code 0 means that every pinned package was looked up and has no known vulnerability."""
    found = audited(tmp_path, json.dumps({"dependencies": dependencies, "fixes": []}))
    assert found[0] == code
    assert message in found[1]


def test_an_audit_that_did_not_run_fails(tmp_path: Path) -> None:
    """Without a valid answer of pip-audit, the exit code is 2."""
    code, message = audited(tmp_path, "Traceback: no network")
    assert code == 2
    assert "Nothing was looked up" in message
