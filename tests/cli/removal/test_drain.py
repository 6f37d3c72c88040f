"""`drain` copies shards to other nodes first, and says that a node may be taken down only when that is true."""

import shutil
import signal
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.agent.repair.audit import Audit
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.nodes import look_at_nodes
from replicated_ckpt.cli.look.progress import read_all
from replicated_ckpt.cli.nodes import drain
from replicated_ckpt.cli.nodes.drain import _Drained, _list_others, _plan
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, held, shard
from tests.agent.repair.test_reprotect import RING, agents, meet, stores
from tests.cli.commands import as_json, command
from tests.damage import flip

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
PATIENT = ("--lost-after-s", "600")


def test_a_drained_node_can_be_lost(tmp_path: Path) -> None:
    """A dry run changes nothing. After `drain`, the other nodes hold every shard, also one that only this node held."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    checkpointed(nodes, 2, {shard(0): (2,)}, checkpoint_id="alone", copies=1)
    with agents(nodes, *PATIENT):
        before = [held(store) for store in nodes]
        code, found = as_json("drain", "--root", nodes[2].root, "--dry-run")
        assert (code, found["may_be_taken_down"]) == (ExitCode.FAILED, False)
        assert {copy["shard"] for copy in found["plan"]["copy"]} == {shard(0), shard(1), shard(2)}
        assert [held(store) for store in nodes] == before
        done = command("drain", "--root", nodes[2].root)
        assert (done.returncode, done.stderr) == (ExitCode.OK, ""), done.stdout
        assert f"host2 (node {nodes[2].node_id()}) may be taken down" in done.stdout
        assert "Other drains do not count its copies until its agent ends" in done.stdout
        assert f"`replicated-ckpt forget {nodes[2].node_id()} --root {nodes[2].root}` on the others" in done.stdout
        assert [held(store) for store in nodes[:2]] == [set(RING), set(RING)]
        assert held(nodes[0], "alone") | held(nodes[1], "alone") == {shard(0)}
    shutil.rmtree(nodes[2].root)
    with agents(nodes[:2], *PATIENT):
        for store in nodes[:2]:
            assert command("forget", "host2", "--root", store.root).returncode == ExitCode.OK
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK


def test_of_two_nodes_that_are_drained_neither_counts_on_the_other(tmp_path: Path) -> None:
    """Two nodes are drained one after the other: the last copy moves to the node that stays."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    with agents(nodes, *PATIENT):
        assert command("drain", "--root", nodes[0].root).returncode == ExitCode.OK
        taker, last = sorted(nodes[1:], key=held, reverse=True)
        assert (held(taker), held(last)) == ({shard(0)}, set())
        done = command("drain", "--root", taker.root)
        assert (done.returncode, done.stderr) == (ExitCode.OK, ""), done.stdout
        assert "not counted, as already drained: host0" in done.stdout
        assert "its copies on the 1 other node that answered" in done.stdout
        assert held(last) == {shard(0)}
        assert command("verify", "--root", last.root).returncode == ExitCode.OK


def test_a_drained_node_counts_again_once_it_is_used_again(tmp_path: Path) -> None:
    """After one of two nodes is drained, the other must stay, until the agent of the first has ended or opened a save."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})

    def drained(index: int) -> ExitCode:
        done = command("drain", "--root", nodes[index].root)
        assert ("no other node can hold a copy: step-1" in done.stdout) == (done.returncode != ExitCode.OK), done.stdout
        return ExitCode(done.returncode)

    with agents(nodes, *PATIENT):
        assert [drained(0), drained(1)] == [ExitCode.OK, ExitCode.FAILED]
    with agents(nodes, *PATIENT) as running:
        assert [drained(1), drained(0)] == [ExitCode.OK, ExitCode.FAILED]
        with running[1].client() as client:
            opening = {"checkpoint_id": "step-2", "session": "s", "overwrite": False, "coordinator": "", "peers": []}
            client.call("POST", f"/v1/saves/{2:032x}", opening)
        assert drained(0) == ExitCode.OK
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK


def test_an_agent_that_restarts_during_a_drain_stays_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent restarts during the drain: it still counts as drained, so the other node must stay."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    with agents(nodes, *PATIENT) as running, ExitStack() as stack:

        def start_again(store: LocalStore) -> Audit:
            running[0].signal(signal.SIGKILL)
            running[0].process.wait(10)
            again = stack.enter_context(running_agent(nodes[0].root, *PATIENT))
            meet(again, running[1])
            return read_all(store)

        monkeypatch.setattr(drain, "read_all", start_again)
        assert drain.run(Namespace(root=nodes[0].root, dry_run=False, json=False)) == ExitCode.OK
        assert "drains do not count its copies until its agent ends" in " ".join(capsys.readouterr().out.split())
        done = command("drain", "--root", nodes[1].root)
        assert done.returncode == ExitCode.FAILED, done.stdout
        assert "not counted, as already drained: host0" in done.stdout
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK


def test_a_node_that_was_not_read_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other agent dies during the check and restarts before copies are counted: its copies, one of them damaged, do
    not count.
    """
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    flip(nodes[1].root / "step-1" / shard(0))
    with agents(nodes, *PATIENT) as running, ExitStack() as stack:

        def break_off(store: LocalStore) -> Audit:
            running[1].signal(signal.SIGKILL)
            running[1].process.wait(10)
            found = read_all(store)
            meet(running[0], stack.enter_context(running_agent(nodes[1].root, *PATIENT)))
            return found

        monkeypatch.setattr(drain, "read_all", break_off)
        assert drain.run(Namespace(root=nodes[0].root, dry_run=False, json=False)) == ExitCode.FAILED
        printed = " ".join(capsys.readouterr().out.split())
        assert "not counted, as it stopped answering: host1" in printed
        assert "must stay up" in printed
        monkeypatch.undo()
        assert command("drain", "--root", nodes[0].root).returncode == ExitCode.OK, "the same command again"
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK


def test_files_that_are_never_copied_are_named(tmp_path: Path) -> None:
    """A user's files beside the shards, and the memory tier, are not copied: the output lists them."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    (nodes[0].root / "step-1" / "tokenizer.json").write_text("{}")
    tier = LocalStore(tmp_path / "memory")
    checkpointed([tier], 2, {shard(0): (0,)}, copies=1)
    found_tier = mock.patch("replicated_ckpt.cli.nodes.drain.find_memory_tier", return_value=tier.root)
    with agents(nodes, *PATIENT), found_tier:
        seen = look_at_nodes(nodes[0])
        drained = _Drained(seen, _plan(seen), 0, {}, [], _list_others(nodes[0]))
        printed = "\n".join(drained.describe(nodes[0]))
        code, found = as_json("drain", "--root", nodes[0].root)
    assert (code, found["may_be_taken_down"], found["not_copied"]) == (ExitCode.OK, True, ["step-1/tokenizer.json"])
    assert "not copied, as it is not part of a checkpoint: step-1/tokenizer.json. Copy what you need by hand" in printed
    assert f"`replicated-ckpt drain --root {tier.root}`" in printed


def test_an_undetected_damaged_copy_does_not_count(tmp_path: Path) -> None:
    """The only other copy has a flipped bit that nothing has read yet: `drain` finds and restores it."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    flip(nodes[1].root / "step-1" / shard(0))
    with agents(nodes, *PATIENT):
        done = command("drain", "--root", nodes[0].root)
        assert (done.returncode, done.stderr) == (ExitCode.OK, ""), done.stdout
        assert held(nodes[1]) == {shard(0)}


def test_a_node_stays_while_the_others_are_silent(tmp_path: Path) -> None:
    """The only other node does not answer: the node must stay, and the next step names the other."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    with agents(nodes, *PATIENT):
        pass
    with agents(nodes[:1], *PATIENT):
        done = command("drain", "--root", nodes[0].root)
    assert done.returncode == ExitCode.FAILED
    assert "must stay up" in done.stdout
    assert "too few nodes answered to hold the copies: step-1" in done.stdout
    assert "no room" not in done.stdout
    assert "next step: start an agent on host1" in done.stdout


def test_a_single_node_cannot_be_drained(tmp_path: Path) -> None:
    """There is no other node: the output says that, and not that room is missing."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)})
    with agents(nodes, *PATIENT):
        done = command("drain", "--root", nodes[0].root)
    assert done.returncode == ExitCode.FAILED
    assert "no room" not in done.stdout
    assert "no other node can hold a copy: step-1" in done.stdout
    assert "next step: run a job with ranks on another node" in done.stdout


def test_a_node_stays_for_a_checkpoint_that_another_node_removed(tmp_path: Path) -> None:
    """Another node removed the checkpoint, so it gets no copies: the node must stay until its own user removes it, too."""
    nodes = stores(tmp_path, 3)
    for number in (1, 2):
        checkpointed(nodes, number, {shard(0): (0, 1)}, checkpoint_id=f"step-{number}", on=(0, 1))
    with agents(nodes, *PATIENT):
        assert "still on host1" in command("rm", "step-1", "--root", nodes[0].root).stdout
        done = command("drain", "--root", nodes[1].root)
        assert done.returncode == ExitCode.FAILED, done.stdout
        reason = "step-1 was removed on host0, so it gets no copies; `rm` it here, too, or copy it by hand first"
        assert f"not drained: {reason}" in done.stdout
        assert "must stay up" in done.stdout
        assert as_json("drain", "--root", nodes[1].root)[1]["stays"] == [reason]
        command("rm", "step-1", "--root", nodes[1].root)
        assert command("drain", "--root", nodes[1].root).returncode == ExitCode.OK


def test_a_node_stays_for_an_open_save(tmp_path: Path) -> None:
    """The shard of an open save lies only on this node: the node must stay."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)}, copies=1)
    nodes[0].begin(Intent(f"{2:032x}", "step-2", "session", overwrite=False))
    with nodes[0].lock_save(f"{2:032x}"), agents(nodes, *PATIENT):
        done = command("drain", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED, done.stdout
        assert "not drained: step-2 is being saved here" in done.stdout
