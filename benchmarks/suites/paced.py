"""Disks of a set speed: ext4 on a loop device in memory, throttled by blkio of cgroup v1. Needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_COMMAND_TIMEOUT_S = 60


def why_no_pace() -> str | None:
    """Why this machine cannot have such disks, or None if it can."""
    if os.geteuid() != 0:
        return "loop devices need root"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    if not os.access(THROTTLE, os.W_OK):
        return f"there is no {THROTTLE}, which sets a device's speed"
    return None


@contextmanager
def paced_disk(image: Path, target: Path, size_bytes: int, bytes_per_s: float) -> Iterator[None]:
    """A file system of `size_bytes` at `target`, in the file `image`, with a limited write speed."""
    with ExitStack() as made:
        with image.open("wb") as file:
            file.truncate(size_bytes)
        made.callback(image.unlink)
        device = _run("losetup", "--find", "--show", str(image))
        made.callback(_run, "losetup", "--detach", device)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        _run("mount", device, str(target))
        made.callback(_run, "umount", str(target))
        number = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        THROTTLE.write_text(f"{number} {bytes_per_s:.0f}")
        made.callback(THROTTLE.write_text, f"{number} 0")
        yield


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.strip()
