"""Checks before a release that the tag, the package's version and CHANGELOG.md agree; writes the lock files.

python tools/release.py check v0.1.0
python tools/release.py lock            writes the lock files of the release's build and of the agent's image
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS: Mapping[str, Sequence[str]] = {
    # The dependencies that an agent imports, without torch and numpy, and those for uploads to S3.
    "tools/agent_image/requirements.txt": ("fastcrc", "xxhash", "cryptography", "botocore", "fsspec"),
    "tools/release-requirements.txt": ("build", "hatchling", "twine", "cyclonedx-bom"),
}
"""The lock files, each with the packages that it locks together with their dependencies."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def find_problems(tag: str, root: Path = ROOT) -> list[str]:
    """The reasons against a release of the tag. Empty if it may be released."""
    version = tag.removeprefix("v")
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    module = (root / "replicated_ckpt" / "version.py").read_text()
    problems = []
    if tag != f"v{declared}":
        problems.append(
            f"The tag is {tag}, but pyproject.toml has the version {declared}. The tag must be v{declared}."
        )
    if f'__version__ = "{declared}"' not in module.splitlines():
        problems.append(f"replicated_ckpt/version.py does not have the version {declared} of pyproject.toml.")
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)$", changelog, re.MULTILINE):
        problems.append(f"CHANGELOG.md has no section {version} with a date, such as `## {version} (2026-12-01)`.")
    return problems


def lock(packages: Sequence[str]) -> str:
    """A requirements file with hashes: the versions that pip picks under constraints.txt, for one Python and platform."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--target", folder]
        target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11"]
        target += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        subprocess.run(
            [*pip, *target, "--report", report, "-c", ROOT / "constraints.txt", *packages], check=True, cwd=folder
        )
        found = json.loads(report.read_text())["install"]
    lines = ["# CPython 3.11, Linux x86_64. `python tools/release.py lock` writes this file."]
    for entry in sorted(found, key=lambda entry: str(entry["metadata"]["name"]).lower()):
        digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{entry['metadata']['name']}=={entry['metadata']['version']} --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    """Returns 1, and prints the reasons, if the tag may not be released."""
    if words == ["lock"]:
        for name, packages in LOCKS.items():
            (ROOT / name).write_text(lock(packages))
        return 0
    if len(words) != 2 or words[0] != "check":
        sys.stderr.write("usage: release.py check TAG, or release.py lock\n")
        return 2
    problems = find_problems(words[1])
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
