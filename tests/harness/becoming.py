"""Gives a forked process the environment, command line and modules that a new process would have."""

import ctypes
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicated_ckpt import failpoints

ROOM_BYTES = 16 << 10  # for what is shown of a process and is longer than what it was forked from has


def become_environment(environment: Mapping[str, str]) -> None:
    """Replaces the environment of the forking process, and everything that was derived from it."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    show_environment(environment)
    failpoints.arm_from_environment(os.environ.get(failpoints.ENV, ""))


def show_environment(environment: Mapping[str, str]) -> None:
    """Writes the environment to where /proc reads a process's initial environment. The harness finds the processes of a
    launch by it. Text beyond the available room is cut off.
    """
    _show([f"{name}={value}" for name, value in environment.items()], 47)  # env_start and env_end of proc(5)


def show_command(command: Sequence[str]) -> None:
    """Writes the command to where /proc reads a process's command line."""
    _show(command, 45)  # arg_start and arg_end


def _show(texts: Sequence[str], field: int) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # field 3 of proc(5) is the first here
    start, end = int(fields[field]), int(fields[field + 1])
    shown = os.fsencode("\0".join(texts))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
