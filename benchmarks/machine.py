"""The machine, versions and commit of a benchmark's run."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.options import Options
from benchmarks.suites.setup import TMPFS, cores, kind_of
from replicated_ckpt.version import __version__

HOME = Path(__file__).resolve().parents[1]


def described(options: Options) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "tmpfs": f"{TMPFS} ({kind_of(TMPFS)})",
        "disk": f"{options.disk} ({kind_of(options.disk)})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "replicated_ckpt": __version__,
        "s3fs": installed("s3fs") or "not installed",
        "commit": _commit(),
        "load_before": "/".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def installed(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The short commit, with a plus if the tree has changes. "unknown" outside of a clone."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10"]
        done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
