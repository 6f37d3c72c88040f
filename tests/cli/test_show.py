"""`show` prints everything about one checkpoint: each file, where it was seen and where it may be."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt.cli.exit_codes import ExitCode
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import RING, agents, stores
from tests.cli.commands import as_json, command
from tests.marks import mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
PATIENT = ("--lost-after-s", "600")


def test_each_file_with_its_holders(tmp_path: Path) -> None:
    """Sizes, owner, copies and hosts of each file, and the run, step and ranks. A silent node is named at its files."""
    nodes = stores(tmp_path, 3)
    manifest = checkpointed(nodes, 7, RING, checkpoint_id="run/step-70")
    with agents(nodes, *PATIENT):
        done = command("show", "run/step-70", "--root", nodes[0].root)
        assert (done.returncode, done.stderr) == (ExitCode.OK, "")
        assert done.stdout.splitlines()[0] == "run/step-70: 2 of 2"
        assert "step:     70" in done.stdout
        assert f"save:     {manifest.save_id}" in done.stdout
        assert "save number 7" in done.stdout
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(shard(1)))
        assert line.split() == [shard(1), "700", "kB", "rank", "0", "2", "of", "2", "host1,", "host2", "-"]
    with agents(nodes[:1], *PATIENT):
        done = command("show", "run/step-70", "--root", nodes[0].root)
        assert done.returncode == ExitCode.UNREACHABLE
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(shard(1)))
        assert line.split()[5:] == ["0", "of", "2", "-", "host1,", "host2"]
        assert "next step: start an agent on host1, host2" in done.stdout
    code, found = as_json("show", "run/step-70", "--root", nodes[0].root)
    assert code == ExitCode.UNREACHABLE
    (one,) = found["saves"]
    assert one["shards"][shard(0)]["seen_on"] == [nodes[0].node_id()]
    assert one["shards"][shard(0)]["not_reached"] == [nodes[1].node_id()]
    assert one["world"][2]["ranks"] == [2]


def test_a_missing_checkpoint_is_not_found(tmp_path: Path) -> None:
    """A missing checkpoint has exit code 3 and a hint."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    done = command("show", "step-9", "--root", nodes[0].root)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_FOUND, "")
    assert f"`replicated-ckpt ls --root {nodes[0].root}` lists the checkpoints" in done.stderr


@pytest.mark.parametrize("verb", mark_long(["show", "verify", "repair", "upload"], keep=["show"]))
def test_latest_is_the_newest_of_one_directory_that_can_be_loaded(tmp_path: Path, verb: str) -> None:
    """`latest` is the checkpoint that a load takes. With checkpoints in several directories, the hint lists each
    `DIRECTORY/latest`.
    """
    nodes = stores(tmp_path, 1)
    for sequence, name in enumerate(("a/step-1", "a/step-2", "b/step-9"), 1):
        checkpointed(nodes, sequence, {shard(0): (0,)}, checkpoint_id=name, copies=1)
    (nodes[0].root / "b/step-9" / shard(0)).unlink()
    root = ["--root", str(nodes[0].root)]
    named = ["--to", f"file://{tmp_path}/bucket"] if verb == "upload" else []
    done = command(verb, "latest", *root, *named)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "'a/latest', 'b/latest'" in done.stderr.partition("Hint: ")[2]
    done = command(verb, "a/latest", *root, *named)
    assert done.returncode == ExitCode.OK, done.stderr
    assert verb in ("verify", "repair") or "a/step-2" in done.stdout
    assert command(verb, "c/latest", *root, *named).returncode == ExitCode.NOT_FOUND
    (nodes[0].root / "a/step-2" / shard(0)).unlink()
    shutil.rmtree(nodes[0].root / "b")
    assert "a/step-1" in command("show", "latest", *root).stdout


@pytest.mark.parametrize("verb", ["show", "rm"])
def test_an_id_with_invalid_utf8_is_not_found(tmp_path: Path, verb: str) -> None:
    """An id with invalid UTF-8 is a missing checkpoint like any other."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    done = command(verb, "l\udce4uf", "--root", nodes[0].root)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_FOUND, "")
    assert "holds a checkpoint 'l\\udce4uf'" in done.stderr


@pytest.mark.parametrize("verb", ["show", "rm"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_stock_checkpoint_is_named_as_such(tmp_path: Path, verb: str) -> None:
    """The error says that stock torch wrote it, and how to get copies."""
    (node,) = stores(tmp_path, 1)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=node.root / "step-10")
    done = command(verb, "step-10", "--root", node.root)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_FOUND, "")
    assert "'step-10' is a checkpoint of stock torch" in done.stderr
    assert "Load it and save it under a new id" in done.stderr
