"""Steps: run an example as a user would, on this rank of a running world."""

import contextlib
import io
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.errors import ReplicatedCkptError
from tests.gloo import GLOO_SETTLE_S
from tests.harness.zygote import REPOSITORY
from tests.steps.context import Context
from tests.steps.state import failure


class _Ear(io.StringIO):
    """A script's output. A line that begins with `text` sends SIGTERM to this process, as a batch system would."""

    def __init__(self, text: str | None) -> None:
        super().__init__()
        self._text = text

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text is not None and text.startswith(self._text):
            os.kill(os.getpid(), signal.SIGTERM)
        return written


def run(context: Context, script: str, arguments: Sequence[str], leave_at: str | None = None) -> list[str]:
    """Runs examples/`script` with this node's store and the arguments. Returns its output."""
    store = _store_as_of_torchrun(context)
    argv = sys.argv
    sys.argv = [script, "--root", str(context.root), *arguments]
    printed = _Ear(leave_at)
    try:
        with contextlib.redirect_stdout(printed), mock.patch.object(dist, "destroy_process_group", _destroy_settled):
            runpy.run_path(str(REPOSITORY / "examples" / script), run_name="__main__")
    finally:
        sys.argv = argv
        sys.stderr.write(printed.getvalue())
    if store is not None:
        _wait_for_the_others(context, store)
    return printed.getvalue().splitlines()


def fails(context: Context, script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs an example that must fail. Returns its error."""
    try:
        run(context, script, arguments)
    except (CheckpointException, ReplicatedCkptError) as exc:
        return failure(exc)
    raise AssertionError("the example should have failed")


def fails_in_stock(context: Context, script: str, arguments: Sequence[str]) -> str:
    """Runs a program for stock DCP that must fail in a load. Returns its error."""
    try:
        run(context, script, arguments)
    except CheckpointException as exc:
        return str(exc)
    raise AssertionError("the program should have failed")


# torch 2.7 joins gloo's threads with the GIL held; one that has the last reference to a tensor waits for it for ever.
_destroy = dist.destroy_process_group


def _destroy_settled() -> None:
    time.sleep(GLOO_SETTLE_S)
    _destroy()


def _store_as_of_torchrun(context: Context) -> "dist.TCPStore | None":
    """Ends the harness's process group, so that the script can create its own over a running store, as under torchrun."""
    if not dist.is_initialized():
        return None
    port: list[Any] = [None]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if context.rank == 0 else None
    if store is not None:
        port = [store.port]
    dist.broadcast_object_list(port)
    dist.barrier()
    _destroy_settled()
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), **torchrun})
    return store or dist.TCPStore("127.0.0.1", int(port[0]), is_master=False)


def _wait_for_the_others(context: Context, store: "dist.TCPStore") -> None:
    """Rank 0 serves the store, and stays until no script uses it any more."""
    store.add("ended", 1)
    while context.rank == 0 and store.add("ended", 0) < context.world_size:
        time.sleep(0.01)
