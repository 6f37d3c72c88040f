"""`forget` removes a node from the address book, and first says what would be lost with it."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.cli.nodes.forget import find_node
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import wait_for
from tests.agent.checkpoints import checkpointed, held, introduced, shard
from tests.agent.repair.test_reprotect import RING, agents, stores
from tests.agent.scattered import ID, scattered
from tests.cli.commands import as_json, command
from tests.damage import flip

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
PATIENT = ("--lost-after-s", "600")


def test_a_forgotten_node_is_replaced(tmp_path: Path) -> None:
    """A node that answers is not forgotten. The copies of a forgotten node are made again, and no output mentions it."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    with agents(nodes, *PATIENT) as running:
        done = command("forget", nodes[1].node_id(), "--root", nodes[0].root)
        assert (done.returncode, "answers" in done.stderr) == (ExitCode.USAGE, True)
        gone = nodes[2].node_id()
        running[2].signal(signal.SIGKILL)
        running[2].process.wait()
        shutil.rmtree(nodes[2].root)
        for store in nodes[:2]:
            done = command("forget", "host2", "--root", store.root)
            assert (done.returncode, done.stderr) == (ExitCode.OK, ""), done.stdout
            assert f"forgotten: this node no longer waits for host2 (node {gone})" in done.stdout
            assert gone not in {peer.node_id for peer in PeerBook(store.root / ".agent").read_all()}
            other = "host1" if store is nodes[0] else "host0"
            again = f"replicated-ckpt forget host2 --root {store.root}"
            assert (
                f"next step: run the same command on {other}, for example with `ssh {other} '{again}'`." in done.stdout
            )
            assert "host2" not in command("show", "step-1", "--root", store.root).stdout.partition("FILE")[2]
            assert "host2" not in command("ls", "--root", store.root).stdout
        wait_for(lambda: all(held(store) == set(RING) for store in nodes[:2]), 30, "the copies")
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK
        _, found = as_json("forget", gone, "--root", nodes[0].root)
        assert found["next_steps"][0].startswith("run the same command on host1, for example with `ssh host1 ")
        for name in (gone, "host2"):  # again, as the first answer may have been lost
            done = command("forget", name, "--root", nodes[0].root)
            assert (done.returncode, done.stderr) == (ExitCode.OK, ""), done.stdout
            assert f"forgotten: this node no longer waits for host2 (node {gone})" in done.stdout
        done = command("forget", "host7", "--root", nodes[0].root)
        assert (done.returncode, "is not in this node's address book" in done.stderr) == (ExitCode.USAGE, True)


def test_a_node_that_got_a_copy_later_may_have_the_only_one(tmp_path: Path) -> None:
    """The manifest does not name a node that got its copy later: that node may still hold the last copy."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, {shard(0): (0, 2)})
    shutil.copy(nodes[0].root / "step-1" / shard(0), nodes[1].root / "step-1" / shard(0))
    shutil.rmtree(nodes[2].root)
    (nodes[0].root / "step-1" / shard(0)).unlink()
    introduced(nodes[0], [AgentAddress(nodes[1].node_id(), "127.0.0.1", 1, "token")])
    with agents(nodes[:1], *PATIENT):
        done = command("forget", nodes[1].node_id(), "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED, done.stdout
        assert f"would be lost: step-1: {shard(0)}" in done.stdout
        assert "1 file not seen" in command("ls", "--root", nodes[0].root).stdout
        done = command("verify", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED, done.stdout
        (short,) = (line for line in done.stdout.splitlines() if "1 of 2 copies; bring back" in line)
        assert f"node {nodes[1].node_id()} (host1)" in short
    with agents(nodes[:2], *PATIENT):
        wait_for(lambda: held(nodes[0]) == {shard(0)}, 30, "a copy from that node")
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK


def test_a_host_with_several_nodes_is_ambiguous(tmp_path: Path) -> None:
    """A host with several nodes is ambiguous, also if one of them is this node."""
    nodes = stores(tmp_path, 2)
    ids = [store.node_id() for store in nodes]
    manifest = checkpointed(nodes, 1, {shard(0): (0, 1)})
    same = replace(manifest, nodes=tuple(replace(node, host="vm") for node in manifest.nodes))
    seen = NodesSeen(ids[0], {}, {ids[1]: AgentAddress(ids[1], "127.0.0.1", 1, "token")}, {}, {same.save_id: same})
    with pytest.raises(ConfigInvalid, match="'vm' names several nodes") as raised:
        find_node(seen, "vm")
    assert raised.value.hint == f"Name one by its id. Known nodes: vm/{ids[1]}."
    assert find_node(seen, f"vm/{ids[1]}") == ids[1]


def test_a_node_that_may_hold_the_last_copy_is_not_forgotten(tmp_path: Path) -> None:
    """A shard that only this node may hold is listed, and nothing changes without --force."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (1,)}, copies=1)
    with agents(nodes, *PATIENT):
        pass
    gone = nodes[1].node_id()
    done = command("forget", gone, "--root", nodes[0].root)
    assert done.returncode == ExitCode.FAILED
    assert (
        f"would be lost: step-1: {shard(1)}: no node that answers has a copy, and host1 (node {gone}) may"
        in done.stdout
    )
    assert f"`replicated-ckpt agent --root {nodes[0].root}`" in done.stdout
    assert gone in {peer.node_id for peer in PeerBook(nodes[0].root / ".agent").read_all()}
    code, found = as_json("forget", gone, "--root", nodes[0].root, "--force")
    assert (code, found["is_forgotten"], found["losses"]) == (ExitCode.OK, True, {"step-1": [shard(1)]})
    assert PeerBook(nodes[0].root / ".agent").read_all() == ()


def test_a_damage_mark_counts_without_an_agent(tmp_path: Path) -> None:
    """A damage mark of the last agent counts while no agent runs: `ls`, `show` and `forget` do not count the copy."""
    nodes = stores(tmp_path, 2)
    manifest = checkpointed(nodes, 1, {shard(0): (0, 1)})
    with agents(nodes, *PATIENT):
        pass
    flip(nodes[0].root / "step-1" / shard(0), 1000)
    DamageBook(nodes[0]).mark("step-1", manifest.save_id, shard(0))
    shown, found = as_json("show", "step-1", "--root", nodes[0].root)
    assert (shown, found["saves"][0]["shards"][shard(0)]["damaged_on"]) == (ExitCode.UNREACHABLE, [nodes[0].node_id()])
    _, listed = as_json("ls", "--root", nodes[0].root)
    assert [row["missing"] for row in listed["checkpoints"]] == [[shard(0)]]
    done = command("forget", nodes[1].node_id(), "--root", nodes[0].root)
    assert done.returncode == ExitCode.FAILED, done.stdout
    assert f"would be lost: step-1: {shard(0)}: no node that answers has a copy" in done.stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_without_a_manifest_may_be_lost(tmp_path: Path) -> None:
    """The last intact manifest, and shards of a stock checkpoint, may lie on the silent node: both are listed."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    contents = scattered(nodes, tmp_path)
    with agents(nodes, *PATIENT):
        pass
    (nodes[0].root / "step-1" / ".manifest.json").write_bytes(b"torn")
    done = command("forget", nodes[1].node_id(), "--root", nodes[0].root)
    assert done.returncode == ExitCode.FAILED, done.stdout
    assert "would be lost: step-1: .manifest.json: no node that answers has a copy" in done.stdout
    missing = sorted(name for name in contents if not (nodes[0].root / ID / name).exists())
    assert f"would be lost: {ID}: {', '.join(missing)}: no node" in done.stdout
    assert nodes[1].node_id() in {peer.node_id for peer in PeerBook(nodes[0].root / ".agent").read_all()}
