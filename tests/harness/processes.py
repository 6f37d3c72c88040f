"""Processes of this machine in /proc: found by their environment or command line, and ended by id."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

_PF_EXITING = 0x4  # of linux/sched.h, in field 9 of proc(5)'s stat


def is_running(pid: int) -> bool:
    """Whether the process exists, and is more than an exit status that nobody has collected.

    A thread that waits for a disk outlives the first thread, and keeps the process's locks.
    """
    process = Path(f"/proc/{pid}")
    try:
        return _state(process) not in {"Z", "X"} or len(list((process / "task").iterdir())) > 1
    except OSError:
        return False


def is_ending(pid: int) -> bool:
    """Whether the kernel is ending the process, or has ended it and nobody has collected its exit status."""
    try:
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return False
    return bool(int(flags) & _PF_EXITING)


def open_files(pid: int) -> list[str]:
    """The open files of a process, by descriptor, as /proc names them. Files that it closes meanwhile are left out."""
    found: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def open_below(folder: Path) -> list[str]:
    """The files below a folder that this process has open. Ending threads may close other descriptors at any time."""
    return [name for name in open_files(os.getpid()) if name.startswith(str(folder))]


def agent_of(root: Path) -> int:
    """The process id of the last agent of a store. The agent may have ended."""
    return int(json.loads((root / ".agent" / "endpoint.json").read_text())["pid"])


def signal_if_running(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def stop_process(pid: int) -> None:
    """Sends SIGSTOP, and returns once no thread of the process runs. `os.kill` returns earlier."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(not _has_halted(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _has_halted(thread: Path) -> bool:
    try:
        return _state(thread) in {"T", "Z", "X"}
    except OSError:
        return True  # it has ended meanwhile


def _state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Waits for the processes to end. Returns those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if is_running(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if is_running(pid)]
    return left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def processes_of(marker: str) -> list[int]:
    """Ids of all running processes, except this one, with `marker` in their command line or environment."""
    needle = marker.encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid
        for pid in pids
        if pid != os.getpid()
        and (needle in _read(Path(f"/proc/{pid}/cmdline")) or needle in _read(Path(f"/proc/{pid}/environ")))
        and is_running(pid)
    ]


def end(pids: list[int]) -> None:
    """Sends SIGKILL to each process, and returns when all are gone."""
    for pid in pids:
        signal_if_running(pid, signal.SIGKILL)
    if left := wait_until_gone(pids, timeout_s=10):
        raise AssertionError(f"processes {left} survive SIGKILL")
