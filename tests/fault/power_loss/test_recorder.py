"""The recorder misses nothing: its log replays to the real tree, and strace sees the same calls."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fault.power_loss.operations import tree_of
from tests.fault.power_loss.recorder import Recorder
from tests.fault.power_loss.scenarios import SCENARIOS, recorded
from tests.fault.power_loss.strace import traced
from tests.marks import mark_long

pytestmark = pytest.mark.fault
TRACED = ["first save", "overwrite", "removal and save over its files"]
"""The scenarios of `make test`, as each one starts an interpreter under strace. The replay covers all scenarios."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_whole_log_replays_to_the_real_tree(name: str, tmp_path: Path) -> None:
    """After each scenario, the replayed log equals the real tree, byte for byte."""
    recorder = recorded(SCENARIOS[name], tmp_path)
    assert recorder.log.replayed().tree() == tree_of(tmp_path)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("name", mark_long(SCENARIOS, keep=TRACED))
def test_strace_sees_the_same_calls(name: str, tmp_path: Path) -> None:
    """The recorded calls are those that strace saw below the root, in the same order."""
    (tmp_path / "base").mkdir()
    seen, noted = traced(name, tmp_path / "base", tmp_path / "strace.log")
    assert seen == noted
    expected = {"open", "write", "fsync", "mkdir", "rename", "unlink"} | (
        {"link"} if SCENARIOS[name].has_hard_links else set()
    )
    assert expected <= {call[0] for call in seen}


def test_every_kind_of_call_is_recorded(tmp_path: Path) -> None:
    """This includes calls that the store does not make now: vectored and positioned writes, truncation, names relative
    to a descriptor.
    """
    (tmp_path / "before").write_bytes(b"before")
    with Recorder(tmp_path) as recorder:
        fd = os.open(tmp_path / "before", os.O_RDWR | os.O_APPEND)
        os.write(fd, b" and after")
        os.close(fd)
        os.makedirs(tmp_path / "a" / "b")  # noqa: PTH103 - makedirs calls os.mkdir, which is recorded
        directory = os.open(tmp_path / "a", os.O_RDONLY | os.O_DIRECTORY)
        fd = os.open("file", os.O_RDWR | os.O_CREAT, dir_fd=directory)
        os.writev(fd, [b"one ", b"two "])
        os.pwrite(fd, b"T", 4)
        os.pwritev(fd, [b"th", b"ree"], 10)
        os.ftruncate(fd, 14)
        os.fdatasync(fd)
        os.close(fd)
        os.rename("file", "b/moved", src_dir_fd=directory, dst_dir_fd=directory)
        os.mkdir("gone", dir_fd=directory)
        os.close(directory)
        os.truncate(tmp_path / "before", 3)
        (tmp_path / "a" / "gone" / "deep").mkdir()
        shutil.rmtree(tmp_path / "a" / "gone")
    assert recorder.live.tree() == tree_of(tmp_path)
    assert recorder.live.tree() == {"before": b"bef", "a": None, "a/b": None, "a/b/moved": b"one Two \0\0thre"}


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    """A write that cannot be recorded fails the test that makes it. A read does not."""
    path = tmp_path / "file"
    path.write_bytes(b"here")
    with Recorder(tmp_path):
        assert path.read_bytes() == b"here"
        with pytest.raises(AssertionError, match="not recorded"):
            path.write_bytes(b"x")
        with pytest.raises(AssertionError, match="symlink is not recorded"):
            (tmp_path / "link").symlink_to(path)
        (tmp_path.parent / f"{tmp_path.name} outside").write_bytes(b"not below")
    assert tree_of(tmp_path) == {"file": b"here"}
