"""What a forked process takes over, so that it is what a new one would have been: environment, command line, modules."""

import ctypes
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicated_ckpt import failpoints

ROOM_BYTES = 16 << 10  # for what is shown of a process and is longer than what it was forked from has


def become_environment(environment: Mapping[str, str]) -> None:
    """Nothing of the environment of the process that forked is left, nor of what was derived from it."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    show_environment(environment)
    failpoints.arm_from_environment(os.environ.get(failpoints.ENV, ""))


def show_environment(environment: Mapping[str, str]) -> None:
    """Writes it where /proc reads a process's environment, as if this one had been started with it.

    The harness finds the processes of a launch so. What does not fit into the room that there is is cut off.
    """
    _show([f"{name}={value}" for name, value in environment.items()], 47)  # env_start and env_end of proc(5)


def show_command(command: Sequence[str]) -> None:
    """Writes it where /proc reads a process's command line."""
    _show(command, 45)  # arg_start and arg_end


def _show(texts: Sequence[str], field: int) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # field 3 of proc(5) is the first here
    start, end = int(fields[field]), int(fields[field + 1])
    shown = os.fsencode("\0".join(texts))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
