"""The release: its workflow, its tag, and the locks of its build tools."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.release import LOCKS, ROOT, find_problems, main

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
LOCKED = re.compile(r"([\w.-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}")


def read_jobs(path: Path) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


def commands_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job.get("steps", ()) if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    """A moved tag of an action changes nothing here. A comment has the version."""
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    for action in used:
        assert action.startswith("./.github/workflows/") or PINNED.fullmatch(action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_a_workflow_exist(path: Path) -> None:
    """Each `make` target and each script that a step runs exists."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(command for job in read_jobs(path).values() for command in commands_of(job))
    wanted = {word for words in re.findall(r"\bmake((?: [a-z-]+)+)", text) for word in words.split()}
    assert wanted
    assert wanted <= targets
    assert all((ROOT / name).exists() for name in re.findall(r"python (tools/\S+)", text))


def test_a_release_needs_a_tag_the_tests_and_no_secret() -> None:
    """Only a pushed tag v* starts it, after all jobs of ci.yml. PyPI accepts an identity instead of a token."""
    document, jobs = yaml.safe_load(RELEASE.read_text()), read_jobs(RELEASE)
    assert document[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as a boolean
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())[True]
    assert (jobs["build"]["needs"], jobs["publish"]["needs"], jobs["files"]["needs"]) == ("tests", "build", "publish")
    assert "secrets." not in RELEASE.read_text()
    assert document["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"


def test_the_version_is_checked_before_anything_is_built() -> None:
    """The steps come in order: version check, wheel and sdist, image, SBOMs, hashes, provenance."""
    job = read_jobs(RELEASE)["build"]
    steps = [step.get("run", step.get("uses", "")) for step in job["steps"]]
    order = ["tools/release.py check", "make dist", "make image", "make sbom", "sha256sum", "attest-build-provenance"]
    places = [next(index for index, step in enumerate(steps) if each in step) for each in order]
    assert places == sorted(places)
    assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}


def test_a_tag_must_be_the_version(tmp_path: Path) -> None:
    """pyproject.toml, version.py and a dated section of CHANGELOG.md must match the tag. Each mismatch is reported."""
    (tmp_path / "replicated_ckpt").mkdir()
    for name in ("pyproject.toml", "replicated_ckpt/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    version = re.search(r'"(.+)"', (ROOT / "replicated_ckpt/version.py").read_text().partition("__version__")[2])
    assert version is not None
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"## {version[1]} (2026-12-01)\n")
    assert find_problems(f"v{version[1]}", tmp_path) == []
    assert "The tag must be" in find_problems("v9.9", tmp_path)[0]
    changelog.write_text(f"## {version[1]} (unreleased)\n")
    assert "with a date" in find_problems(f"v{version[1]}", tmp_path)[0]
    (tmp_path / "replicated_ckpt/version.py").write_text('__version__ = "0"\n')
    assert "version.py" in find_problems(f"v{version[1]}", tmp_path)[0]
    assert main(["check", "v9.9"]) == 1
    assert main(["release"]) == 2


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_hashes_and_the_pinned_versions(name: str) -> None:
    """Each line has a version and a hash. Versions match constraints.txt where that pins the package."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    lines = (ROOT / name).read_text().splitlines()[1:]
    found = {match[1]: match[2] for match in map(LOCKED.fullmatch, lines) if match}
    assert len(found) == len(lines)
    assert set(LOCKS[name]) <= found.keys()
    assert {package: version for package, version in found.items() if pinned.get(package, version) != version} == {}
    assert found.keys().isdisjoint({"torch", "numpy"})
