"""Several ranks of one launch, forked from a process that has imported torch once: that import is most of a short test."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401 - imported for the ranks

from tests.multiprocess import steps_state, worker  # noqa: F401

FIRST_FAILURE_GRACE_S = 8.0
_POLL_S = 0.02


def become_rank(spec_path: Path, rank: dict[str, Any]) -> int:
    """In the forked child: its own session, environment and output, then the rank itself."""
    os.setsid()
    os.environ.update(rank["env"])
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return worker.main(spec_path)


def main(spec_path: Path, ranks: list[dict[str, Any]]) -> int:
    """Starts the ranks and waits for them; once one failed, for the others a little longer."""
    running = set()
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            return become_rank(spec_path, rank)
        running.add(pid)
    failed, deadline = 0, float("inf")
    while running and time.monotonic() < deadline:
        for pid in sorted(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                if code and not failed:
                    failed, deadline = code, time.monotonic() + FIRST_FAILURE_GRACE_S
        time.sleep(_POLL_S)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
