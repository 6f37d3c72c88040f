"""Removes what runs killed with SIGKILL left: processes, mounts, loop devices, network namespaces, directories.

All names contain the id of the process that created them. They are stale if that process has ended.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites.paced import THROTTLE
from tests.harness.namespaces import NETWORKS
from tests.harness.processes import end, is_running, processes_of

_NAME = re.compile(r"rckpt-(?:bench-(\d+)-|(\d+)-[0-9a-f]{8}(?:-|$))")  # names of directories and networks
_COMMAND_TIMEOUT_S = 60


def remove_stale_files(homes: Sequence[Path]) -> list[str]:
    """Removes directories of dead runs in `homes` and, as root, their other remains on this machine. Returns the names."""
    folders = [path for home in homes for path in sorted(home.glob("rckpt-bench-*")) if _is_stale(path)]
    removed = []
    for folder in folders:
        end(processes_of(f"{folder}/"))
    if os.geteuid() == 0:
        removed += _mounts() + _loop_devices() + _networks()
    for folder in folders:
        shutil.rmtree(folder)
    return removed + [str(folder) for folder in folders]


def _is_stale(folder: Path) -> bool:
    """Whether this user's dead run left the folder. Other users may write to /dev/shm and /tmp, too."""
    return _is_dead(folder.name) and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid()


def _is_dead(path: str) -> bool:
    """Whether a part of the path names a run, and no process of such a run exists."""
    runs = [found for part in path.split("/") if (found := _NAME.match(part))]
    return bool(runs) and not any(is_running(int(run[1] or run[2])) for run in runs)


def _mounts() -> list[str]:
    targets = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    dead = [target for target in reversed(targets) if _is_dead(target) and NETWORKS not in Path(target).parents]
    for target in dead:
        _run("umount", "--lazy", target)
    return dead


def _loop_devices() -> list[str]:
    """Removes the devices' speed limits, too, because other devices will get their numbers."""
    removed = []
    for known in Path("/sys/block").glob("loop*/loop/backing_file"):
        device = known.parents[1]
        if _is_dead(known.read_text().strip()):
            if THROTTLE.exists():
                THROTTLE.write_text(f"{(device / 'dev').read_text().strip()} 0")
            _run("losetup", "--detach", f"/dev/{device.name}")
            removed.append(f"/dev/{device.name}")
    return removed


def _networks() -> list[str]:
    dead = [path.name for path in NETWORKS.glob("rckpt-*") if _is_dead(path.name)]
    for name in dead:
        _run("ip", "netns", "del", name)
    return [f"network namespace {name}" for name in dead]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_COMMAND_TIMEOUT_S)
