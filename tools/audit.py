"""Reports known vulnerabilities of the pinned dependencies by `pip-audit`, and the packages that it could not look up.

make audit            pip-audit's own exit code is 0 even if the index answered for no package
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
NONE_KNOWN, FOUND, NOT_LOOKED_UP = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Audits constraints.txt. Further arguments go to pip-audit, for example `--vulnerability-service osv`."""
    audit = [str(Path(sys.executable).with_name("pip-audit")), "--disable-pip", "--no-deps", "--format", "json"]
    done = subprocess.run(
        [*audit, "--progress-spinner", "off", "-r", str(CONSTRAINTS), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        sys.stdout.write(f"{done.stderr}\nNothing was looked up: pip-audit ended with exit code {done.returncode}.\n")
        return NOT_LOOKED_UP
    lines, code = judge(dependencies)
    sys.stdout.write("\n".join(lines) + "\n")
    return code


def judge(dependencies: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """The report's lines and the exit code: 0 only if every package was looked up and none has a known vulnerability."""
    skipped = [entry["name"] for entry in dependencies if "skip_reason" in entry]
    found = [(entry, bad) for entry in dependencies for bad in entry.get("vulns", ())]
    lines = [
        f"{entry['name']} {entry['version']}: {bad['id']}, fixed in {', '.join(bad['fix_versions']) or 'no version'}"
        for entry, bad in found
    ]
    looked_up = len(dependencies) - len(skipped)
    lines.append(
        f"{looked_up} of {len(dependencies)} pinned packages were looked up, {len(found)} vulnerabilities are known."
    )
    if skipped:
        shown = ", ".join(skipped[:8]) + (", ..." if len(skipped) > 8 else "")
        lines.append(f"Nothing is known about the other {len(skipped)}, as the package index has no answer: {shown}")
    return lines, FOUND if found else NOT_LOOKED_UP if skipped else NONE_KNOWN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
