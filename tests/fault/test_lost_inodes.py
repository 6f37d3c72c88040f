"""A disk sector with one inode is lost: the other checkpoints on that disk are listed, read and protected as before."""

import errno
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.errors import ManifestInvalid
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace
from tests.agent.checkpoints import checkpointed, findings, shard

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root"),
]
IDS = ["step-1", "step-2", "step-3"]
LOST = {"shard": f"step-2/{shard(0)}", "manifest": f"step-2/{MANIFEST_NAME}", "directory": "step-2"}


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def lose(tmp_path: Path) -> Iterator[Callable[[str], LocalStore]]:
    """`lose(name)` makes a store with three checkpoints on an ext4 image of its own, and corrupts the inode checksum of
    the named file.
    """
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()

    def mount() -> None:
        try:
            run("mount", "-o", "loop,errors=continue", image, disk)
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no ext4 can be mounted here: {exc}")

    def lose(name: str) -> LocalStore:
        try:
            run("truncate", "-s", "16M", image)
            run("mkfs.ext4", "-q", "-O", "metadata_csum", image)
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no ext4 can be made here: {exc}")
        mount()
        store = LocalStore(disk / "root")
        for number, checkpoint_id in enumerate(IDS, 1):
            checkpointed([store], number, {shard(0): [0]}, checkpoint_id=checkpoint_id, copies=1, size_bytes=3000)
        run("umount", disk)
        place = re.search(r"block (\d+), offset (0x[0-9a-f]+)", run("debugfs", "-R", f"imap /root/{name}", image))
        size = re.search(r"Block size: +(\d+)", run("dumpe2fs", "-h", image))
        assert place is not None
        assert size is not None
        with image.open("r+b") as file:
            file.seek(int(place[1]) * int(size[1]) + int(place[2], 16) + 8)
            file.write(b"\xff" * 8)
        mount()
        with pytest.raises(OSError, match=os.strerror(errno.EBADMSG)):
            (store.root / name).lstat()
        return LocalStore(store.root)

    yield lose
    subprocess.run(["umount", "--lazy", disk], check=False, capture_output=True)


@pytest.mark.parametrize("kind", LOST)
def test_the_other_checkpoints_are_looked_after(lose: Callable[[str], LocalStore], kind: str) -> None:
    """The other checkpoints are listed, read and protected. The damaged one is reported as damaged, not as missing."""
    store = lose(LOST[kind])
    service, stopping = NodeService(store), threading.Event()
    assert {held.checkpoint_id for held in service.holdings()} == {*IDS} - ({"step-2"} if kind != "shard" else set())
    assert {Path(found.path).relative_to(store.root).parts[0] for found in findings(store)} == {"step-2"}
    assert Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping).round().lost == 1
    assert list(store.catalog.without_manifest()) == []
    if kind == "shard":
        assert service.holdings("step-2")[0].damaged == (shard(0),)
        return
    with pytest.raises(ManifestInvalid, match="cannot determine the state of"):  # "unknown" lets others drop it
        service.state_of(f"{2:032x}")
