"""Every command works on a memory tier. `ls` and `status` of the disk mention the tier."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.dcp.memory.root import SHARED_MEMORY
from replicated_ckpt.stores.local.memory_tier import find_memory_tier, note_memory_tier
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import checkpointed
from tests.agent.repair.test_reprotect import PAIR, agents
from tests.cli.commands import as_json, command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


@pytest.fixture
def tiers() -> Iterator[list[LocalStore]]:
    """The memory tiers of two nodes, in shared memory, with steps 1 to 3."""
    with tempfile.TemporaryDirectory(prefix="rckpt-test-", dir=SHARED_MEMORY) as folder:
        stores = [LocalStore(Path(folder) / name) for name in ("a", "b")]
        for step in (1, 2, 3):
            checkpointed(stores, step, PAIR, checkpoint_id=f"step-{step}", size_bytes=50_000)
        yield stores


def test_each_verb_takes_a_memory_tier(tiers: list[LocalStore]) -> None:
    """Agents of the tier run. As on a disk, a removal on one node leaves the copies of the other."""
    root = tiers[0].root
    with agents(tiers, "--lost-after-s", "600"):
        for verb, code, printed in (
            ("ls", ExitCode.OK, "3 checkpoints"),
            ("show step-2", ExitCode.OK, "step-2: 2 of 2"),
            ("status", ExitCode.OK, "good"),
            ("verify", ExitCode.OK, "intact"),
            ("rm step-1", ExitCode.FAILED, "removed on this node: step-1"),
            ("prune --keep-last 1", ExitCode.FAILED, "removed on this node: step-2"),
            ("drain", ExitCode.OK, "may be taken down"),
        ):
            done = command(*verb.split(), "--root", root)
            assert (done.returncode, printed in done.stdout) == (code, True), done.stdout + done.stderr
    assert [name for name, _ in tiers[0].catalog.committed()] == ["step-3"]


def test_the_disk_lists_its_memory_tier(tmp_path: Path, tiers: list[LocalStore]) -> None:
    """`ls` and `status` of the disk print the tier and its newest checkpoint. After a reboot they print that it is
    empty.
    """
    disk = LocalStore(tmp_path / "disk")
    disk.node_id()
    assert "memory tier" not in command("ls", "--root", disk.root).stdout
    note_memory_tier(disk, tiers[0].root)
    for verb in ("ls", "status"):
        printed = [line for line in command(verb, "--root", disk.root).stdout.splitlines() if "memory tier" in line]
        assert len(printed) == 1
        assert str(tiers[0].root) in printed[0]
        assert "the newest step-3" in printed[0]
        assert as_json(verb, "--root", disk.root)[1]["memory_tier"] == printed
    shutil.rmtree(tiers[0].root)
    assert "empty on this node" in command("ls", "--root", disk.root).stdout
    assert not tiers[0].root.exists()


def test_a_tier_that_another_user_could_have_named_is_ignored(tmp_path: Path, tiers: list[LocalStore]) -> None:
    """The file that names the tier is writable for others: it is ignored, and `ls` prints the rest."""
    disk = LocalStore(tmp_path / "disk")
    disk.node_id()
    note_memory_tier(disk, tiers[0].root)
    assert find_memory_tier(disk) == tiers[0].root
    os.chmod(disk.root_agent_directory() / "tiers.json", 0o666)  # noqa: PTH101
    done = command("ls", "--root", disk.root)
    assert (done.returncode, "it cannot be read" in done.stdout) == (ExitCode.OK, True), done.stdout
