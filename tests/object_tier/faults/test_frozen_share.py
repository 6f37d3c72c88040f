"""A shared file system as the object tier (`file://...`): training goes on while the file system is frozen."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from tests.agent.agents import stop_agent

SAVES = 20
pytestmark = [
    pytest.mark.fault,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:.*can hold only 1:replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=60, capture_output=True)


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system that the kernel can freeze. While frozen, writers block, as with a dead NFS server."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("only root can mount and freeze a file system")
    image, mount = tmp_path / "image", tmp_path / "share"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(128 << 20)
    try:
        run("mkfs.ext4", "-q", image)
        run("mount", "-o", "loop", image, mount)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no loop device here: {exc}")
    try:
        yield mount
    finally:
        run("umount", "--lazy", mount)


@contextmanager
def frozen(share: Path) -> Iterator[None]:
    run("fsfreeze", "--freeze", share)
    try:
        yield
    finally:
        run("fsfreeze", "--unfreeze", share)


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((1000, 100), float(number))}


def test_saves_go_on_while_the_share_is_frozen(tmp_path: Path, share: Path) -> None:
    """Twenty saves finish on the node's disk while the share is frozen. After it thaws, the newest is uploaded."""
    root = tmp_path / "nvme"
    writer = ReplicatedWriter(root, object_store=f"file://{share}/run")
    try:
        dcp.save(state(0), checkpoint_id="step-0", storage_writer=writer)
        assert writer.wait() == ("step-0",)
        with frozen(share):
            slowest_s = 0.0
            for number in range(1, SAVES + 1):
                began = time.monotonic()
                dcp.save(state(number), checkpoint_id=f"step-{number}", storage_writer=writer)
                slowest_s = max(slowest_s, time.monotonic() - began)
            loaded = state(0)
            dcp.load(loaded, checkpoint_id="latest", storage_reader=ReplicatedReader(root))
            assert torch.equal(loaded["weights"], state(SAVES)["weights"])
        assert slowest_s < 20, "a save has waited for the share"
        assert f"step-{SAVES}" in writer.wait()
        stop_agent(root)
        loaded = state(0)
        dcp.load(loaded, checkpoint_id="latest", storage_reader=ReplicatedReader(object_store=f"file://{share}/run"))
        assert torch.equal(loaded["weights"], state(SAVES)["weights"])
    finally:
        stop_agent(root)
