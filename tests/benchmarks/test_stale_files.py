"""A benchmark removes what killed runs left behind, and nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.suites.paced import why_no_pace
from benchmarks.suites.stale_files import remove_stale_files
from tests.harness.namespaces import NETWORKS
from tests.harness.network import why_no_network


def _gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def test_only_directories_of_dead_runs_are_removed(tmp_path: Path) -> None:
    """A dead run's directory is removed with its contents. Directories of live runs, foreign ones and links stay."""
    gone, elsewhere = _gone(), tmp_path / "elsewhere"
    dead, alive, other, link = (
        tmp_path / f"rckpt-bench-{name}" for name in (f"{gone}-a", f"{os.getpid()}-b", "c1234567", f"{gone}-d")
    )
    for folder in (dead, alive, other, elsewhere):
        (folder / "cluster" / "node0").mkdir(parents=True)
    link.symlink_to(elsewhere)
    assert [what for what in remove_stale_files([tmp_path]) if str(tmp_path) in what] == [str(dead)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (alive, other, elsewhere, link)
    )
    assert (elsewhere / "cluster").exists()


@pytest.mark.skipif(bool(why := why_no_network() or why_no_pace()), reason=why or "")
def test_disks_and_networks_of_dead_runs_are_removed(tmp_path: Path) -> None:
    """A dead run's file system is unmounted, its loop device is freed, and its network namespace is deleted."""
    name = f"{_gone()}-0a1b2c3d"
    folder, network = tmp_path / f"rckpt-bench-{name}", f"rckpt-{name}-0"
    image, target = folder / "disk0", folder / "cluster" / "node0"
    target.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(4 << 20)
    device = _run("losetup", "--find", "--show", str(image))
    _run("mkfs.ext4", "-q", device)
    _run("mount", device, str(target))
    _run("ip", "netns", "add", network)
    own = [str(target), device, f"network namespace {network}", str(folder)]
    assert [what for what in remove_stale_files([tmp_path]) if what in own] == own, (
        "other killed runs may be reported as well"
    )
    assert _run("losetup", "--associated", str(image)) == ""
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    assert not (NETWORKS / network).exists()
    assert not folder.exists()
