"""Runs README's ten lines in the environment of this Python, as a user of the wheel does first."""

import re
import sys
import tempfile
from pathlib import Path

_ROOT = "/tmp/first-run"  # noqa: S108 - as README says it; nothing is written there


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    block = re.search(r"<!-- runnable -->\n```python\n(.*?)```", text, re.DOTALL)
    if block is None or f'"{_ROOT}"' not in block[1]:
        raise SystemExit(f"{sys.argv[1]} has no ten lines")
    with tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    ) as folder:  # an agent may write its log there until it ends
        names: dict[str, object] = {}
        exec(block[1].replace(_ROOT, f"{folder}/ckpt"), names)  # noqa: S102 - it is ours
        if not (Path(folder) / "ckpt" / "step-1000" / ".metadata").is_file():
            raise SystemExit("the ten lines have saved nothing")
    print("the ten lines run")


if __name__ == "__main__":
    main()
