"""A directory that a user renamed or copied belongs to the user: commands leave it alone, and nodes keep its copies."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import describe_bytes
from tests.agent.agents import wait_for
from tests.agent.checkpoints import checkpointed, findings, held, shard
from tests.agent.repair.test_reprotect import PAIR, agents, stores
from tests.cli.commands import command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]
QUICK = ("--lost-after-s", "2", "--round-every-s", "1")
BOTH = {shard(0), shard(1)}


def copied_by_hand(tmp_path: Path) -> list[LocalStore]:
    """Three checkpoints on two nodes, and `mine`, a copy of the first one that a user made on each node."""
    nodes = stores(tmp_path, 2)
    for number in (1, 2, 3):
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=3000)
    for store in nodes:
        shutil.copytree(store.root / "step-1", store.root / "mine")
    return nodes


def names(store: LocalStore) -> list[str]:
    return [name for name, _ in sorted(store.catalog.committed())]


def hold(nodes: Sequence[LocalStore], expected: list[str]) -> bool:
    return all(names(store) == expected for store in nodes)


def test_rm_of_a_copy_leaves_the_original(tmp_path: Path) -> None:
    """The copy has the save id of the original, so `rm` refuses and advises `rm -r` on all nodes."""
    nodes = copied_by_hand(tmp_path)
    with agents(nodes, *QUICK):
        done = command("rm", "mine", "--root", nodes[0].root, "--force")
        assert done.returncode == ExitCode.USAGE
        assert "renamed or copied by hand from 'step-1'" in done.stderr
        assert f"rm -r {nodes[0].root / 'mine'}" in done.stderr
        time.sleep(2)
        assert hold(nodes, ["mine", "step-1", "step-2", "step-3"])
        for store in nodes:
            shutil.rmtree(store.root / "mine")
            time.sleep(0.5)
        time.sleep(3)
        assert hold(nodes, ["step-1", "step-2", "step-3"]), "no node restores the copy"
    assert [findings(store) for store in nodes] == [[], []]


def test_a_copy_is_protected_when_the_original_is_removed(tmp_path: Path) -> None:
    """The copy is a checkpoint of its own: a lost shard is restored."""
    nodes = copied_by_hand(tmp_path)
    with agents(nodes, *QUICK):
        freed = describe_bytes(sum(nodes[0].catalog.look("step-1").sizes.values()))
        assert (
            f"removed on this node: step-1 ({freed} freed)" in command("rm", "step-1", "--root", nodes[0].root).stdout
        )
        again = command("rm", "step-1", "--root", nodes[0].root).stdout
        assert again.startswith("not on this node, and not copied here again: step-1\n"), (
            "the copy is another checkpoint"
        )
        assert "removed on this node: step-1" in command("rm", "step-1", "--root", nodes[1].root).stdout
        assert hold(nodes, ["mine", "step-2", "step-3"])
        listed = command("ls", "--root", nodes[0].root).stdout
        assert "removed on" not in listed
        (nodes[0].root / "mine" / shard(0)).unlink()
        wait_for(lambda: held(nodes[0], "mine") == BOTH, 30, "the restored shard of the copy")
        assert hold(nodes, ["mine", "step-2", "step-3"])
    assert [findings(store) for store in nodes] == [[], []]


def test_prune_leaves_a_renamed_checkpoint(tmp_path: Path) -> None:
    """`prune` neither removes nor counts the copy."""
    nodes = copied_by_hand(tmp_path)
    with agents(nodes, *QUICK):
        for store in nodes:
            done = command("prune", "--keep-last", "1", "--root", store.root)
            assert "mine" not in done.stdout
        assert done.returncode == ExitCode.OK
        assert hold(nodes, ["mine", "step-3"])
    assert [findings(store) for store in nodes] == [[], []]
