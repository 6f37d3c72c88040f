"""Runs the README's job as the only rank, with the packages of this Python, as a user of the wheel does first."""

import os
import re
import socket
import sys
import tempfile
from pathlib import Path


def alone_on(root: Path) -> dict[str, str]:
    """The environment of the only rank of a job, as torchrun would set it, with `root` for its checkpoints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ROOT": str(root)}


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    block = re.search(r"<!-- runnable -->\n```python\n(.*?)```", text, re.DOTALL)
    if block is None or 'os.environ["ROOT"]' not in block[1]:
        raise SystemExit(f"{sys.argv[1]} has no job")
    with tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    ) as folder:  # an agent may write its log there until it exits
        root = Path(folder) / "ckpt"
        os.environ |= alone_on(root)
        names: dict[str, object] = {}
        exec(block[1], names)  # noqa: S102 - the code is our README's
        if not (root / "step-300" / ".metadata").is_file():
            raise SystemExit("the job saved nothing")
    print("the README's job runs")


if __name__ == "__main__":
    main()
