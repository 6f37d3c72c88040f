"""Exit codes of `replicated-ckpt`, the same for every verb, and the handling of SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import NoReturn

from replicated_ckpt.errors import (
    AgentUnavailable,
    CheckpointNotFound,
    ConfigInvalid,
    ReplicatedCkptError,
    ShardLost,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.wording import NOT_REACHED


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    SHARD_LOST = 4
    UNREACHABLE = 5
    INTERNAL = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it


MEANING = {
    ExitCode.OK: "success",
    ExitCode.FAILED: "a check failed, or the command could not do everything: see the output",
    ExitCode.USAGE: "invalid arguments",
    ExitCode.NOT_FOUND: "checkpoint not found",
    ExitCode.SHARD_LOST: "a shard has no intact copy",
    ExitCode.UNREACHABLE: "an agent or a store did not answer, or refused access",
    ExitCode.INTERNAL: "a defect in replicated_ckpt: please report it",
    ExitCode.INTERRUPTED: "interrupted from the keyboard",
}


def exit_code_of(error: ReplicatedCkptError) -> ExitCode:
    # A node that did not answer may have the checkpoint: a script must not conclude that it is gone.
    if isinstance(error, CheckpointNotFound) and error.unreached:
        return ExitCode.UNREACHABLE
    # A silent node may have the last copy of the shard.
    if isinstance(error, ShardLost) and any(NOT_REACHED in place for place in error.searched):
        return ExitCode.UNREACHABLE
    by_error = {
        ConfigInvalid: ExitCode.USAGE,
        CheckpointNotFound: ExitCode.NOT_FOUND,
        ShardLost: ExitCode.SHARD_LOST,
        AgentUnavailable: ExitCode.UNREACHABLE,
        StoreUnavailable: ExitCode.UNREACHABLE,
        StoreDenied: ExitCode.UNREACHABLE,
    }
    return next((code for kind, code in by_error.items() if isinstance(error, kind)), ExitCode.FAILED)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that incomplete output is removed."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    # Slurm and Kubernetes end a job by SIGTERM, which by default ends Python without any cleanup.
    was = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, was)
