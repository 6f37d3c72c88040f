"""Steps: run an example as its author would, on this rank of a world that was started for it."""

import contextlib
import io
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import ReplicatedCkptError
from tests.multiprocess.context import Context
from tests.multiprocess.steps_state import failure
from tests.multiprocess.zygote import REPOSITORY


class _Ear(io.StringIO):
    """What a script prints; at a line that begins with `text` this process is sent SIGTERM, as if by a batch system."""

    def __init__(self, text: str | None) -> None:
        super().__init__()
        self._text = text

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text is not None and text.startswith(self._text):
            os.kill(os.getpid(), signal.SIGTERM)
        return written


def run(context: Context, script: str, arguments: Sequence[str], leave_at: str | None = None) -> list[str]:
    """Runs examples/`script` with this node's store and the arguments; returns what it printed."""
    _leave_the_world()
    argv = sys.argv
    sys.argv = [script, "--root", str(context.root), *arguments]
    printed = _Ear(leave_at)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(REPOSITORY / "examples" / script), run_name="__main__")
    finally:
        sys.argv = argv
        sys.stderr.write(printed.getvalue())
    return printed.getvalue().splitlines()


def fails(context: Context, script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs an example that must fail, and returns how."""
    try:
        run(context, script, arguments)
    except (CheckpointException, ReplicatedCkptError) as exc:
        return failure(exc)
    raise AssertionError("the example should have failed")


def _leave_the_world() -> None:
    """Ends the harness's process group: the script makes its own, as under torchrun, at an address of its own."""
    if not dist.is_initialized():
        return
    port: list[Any] = [None]
    if dist.get_rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = [listener.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])
