"""`ls` lists the copies seen and wanted, with silent nodes and damaged files."""

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import LOST, WHOLE, CheckpointSeen, advise
from replicated_ckpt.cli.look.nodes import NodesSeen, advise_on_lost, advise_on_silence, advise_on_unknown_nodes
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.peers.manifests import ManifestBook
from replicated_ckpt.node.peers.watch import NodeHoldings
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import retire
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import stop_agent, wait_for
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.agent.http.test_tls import certificate
from tests.agent.repair.test_reprotect import PAIR, RING, agents, stores
from tests.cli.commands import as_json, command
from tests.damage import make_newer

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
PATIENT = ("--lost-after-s", "600")


def line_of(text: str, checkpoint_id: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{checkpoint_id} "))
    return line


def test_a_table_with_header_and_totals(tmp_path: Path) -> None:
    """The table has id, time, step, size, copies, hosts and bucket, the newest first. The last line has totals."""
    nodes = stores(tmp_path, 2)
    for number, checkpoint_id in ((1, "run/step-100"), (2, "final")):
        checkpointed(nodes, number, PAIR, checkpoint_id=checkpoint_id, size_bytes=500_000)
    with agents(nodes, *PATIENT):
        done = command("ls", "--root", nodes[0].root)
        code, found = as_json("ls", "--root", nodes[0].root)
    assert (done.returncode, code, done.stderr) == (ExitCode.OK, ExitCode.OK, "")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["ID", "SAVED", "AT", "STEP", "CONTENT", "SIZE", "COPIES", "HOSTS", "BUCKET"]
    assert rows[0].startswith("final ")
    assert rows[1].split()[:2] == ["run/step-100", "-"]
    assert " 100   full     1 MB  2 of 2 " in line_of(done.stdout, "run/step-100")
    assert "host0, host1" in line_of(done.stdout, "run/step-100")
    assert rows[2] == "2 checkpoints, 2 MB in one copy of each; 2 of 2 nodes answered"
    by_id = {row["checkpoint_id"]: row for row in found["checkpoints"]}
    assert by_id["run/step-100"]["step"] == 100
    assert by_id["final"]["step"] is None
    assert (by_id["run/step-100"]["copies_seen"], by_id["run/step-100"]["copies_wanted"]) == (2, 2)
    assert by_id["run/step-100"]["nodes"] == sorted(store.node_id() for store in nodes)
    assert {node["node_id"]: node["host"] for node in found["nodes"]} == {
        store.node_id(): f"host{index}" for index, store in enumerate(nodes)
    }


def test_a_node_without_an_identity_is_this_node(tmp_path: Path) -> None:
    """Without node.json, the own node has no id, and is printed as "this node"."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    (node.root / "node.json").unlink()
    assert " this node " in line_of(command("ls", "--root", node.root).stdout, "step-1")
    assert "\nthis node  none " in command("status", "--root", node.root).stdout  # no agent


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    """A checkpoint of a newer format has a line of its own outside the table."""
    (store,) = stores(tmp_path, 1)
    checkpointed([store], 1, {shard(0): [0]}, copies=1)
    make_newer(store.root / "step-1" / MANIFEST_NAME)
    done = command("ls", "--root", store.root)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "step-1: only a newer version of replicated_ckpt reads it" in done.stdout


def test_a_checkpoint_that_is_removed_meanwhile_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint is removed between its listing and the read of its manifest: `ls` does not list it."""
    (node,) = stores(tmp_path, 1)
    old, _ = (checkpointed([node], n, {shard(0): (0,)}, copies=1, checkpoint_id=f"step-{n}") for n in (1, 2))
    look_up = ManifestBook.of

    def retire_and_look_up(book: ManifestBook, views: Sequence[NodeView]) -> Mapping[str, Manifest]:
        retire(node.root, "step-1", old.save_id)
        return look_up(book, views)

    monkeypatch.setattr(ManifestBook, "of", retire_and_look_up)
    assert main(["ls", "--root", str(node.root)]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "step-1" not in printed
    assert "1 checkpoint, " in printed


def test_a_node_that_is_not_reached_is_named(tmp_path: Path) -> None:
    """The agent of a node is down: `ls` and `verify` print 1 of 2 copies, the node, the reason and the next step."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, *PATIENT):
        pass
    gone = nodes[1].node_id()
    done = command("ls", "--root", nodes[0].root)
    assert done.returncode == ExitCode.OK
    assert "1 of 2 copies seen: host1 not reached" in line_of(done.stdout, "step-1")
    assert f"host1 (node {gone}): not reached: no agent runs there (asked at 127.0.0.1:" in done.stdout
    assert "--start-agents" in done.stdout
    assert (
        "if host1 never comes back: run the job with a new node in its place, which receives the copies" in done.stdout
    )
    assert "--lost" not in done.stdout, "no other node could take the copies"
    code, found = as_json("ls", "--root", nodes[0].root)
    (row,) = found["checkpoints"]
    assert (row["state"], row["copies_seen"], row["copies_wanted"], row["not_reached"]) == ("short", 1, 2, [gone])
    assert [node["is_reached"] for node in found["nodes"] if node["node_id"] == gone] == [False]
    done = command("verify", "--root", nodes[0].root)
    assert done.returncode == ExitCode.UNREACHABLE
    assert "step-1: 1 of 2 copies seen: host1 not reached" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.endswith("all that was read is intact; 1 node did not answer"), last
    assert code == ExitCode.OK


def test_a_node_of_another_release_has_its_own_next_step() -> None:
    """The next step for an agent of another release is the hint of its refusal, not about a stopped process or a
    firewall.
    """
    refused = ConfigInvalid("This agent runs 0.2.0 (protocol 2).", "Install the newer release on all nodes.")
    (only,) = advise_on_silence(NodesSeen("n", {}, {}, {"gone": refused}, {}), ["gone"], "root")
    assert only == f"next step for gone: {refused.hint}"


def test_nodes_without_an_address_are_named(tmp_path: Path) -> None:
    """Nodes without an address are not called silent. The next step says how to get their address."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    checkpointed(nodes[:2], 2, PAIR, checkpoint_id="step-2")
    done = command("ls", "--root", nodes[0].root)
    assert "1 file not seen: this node has no address of host1, host2" in line_of(done.stdout, "step-1")
    assert "1 of 2, as there is 1 node: this node has no address of host1" in line_of(done.stdout, "step-2")
    assert "next step: this node has no address of host1, host2: a save or load with ranks" in done.stdout


def test_a_node_given_as_lost_needs_no_address() -> None:
    """A node that was named with `repair --lost` is not listed as a node without an address."""
    given_up = AgentAddress("b", "host1", 1, "token")
    assert advise_on_unknown_nodes(["b"], NodesSeen("a", {"a": NodeHoldings(())}, {"b": given_up}, {}, {})) == []


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "another certificate"])
def test_a_node_with_a_wrong_certificate_has_a_next_step(tmp_path: Path, is_plain: bool) -> None:
    """A node serves plain HTTP, or another certificate: the next step is about that, not about a firewall."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    cert, key = certificate(tmp_path, "second")
    options = ["--plain"] if is_plain else ["--tls-cert", cert, "--tls-key", key]
    with agents(nodes[1:], *PATIENT, *options) as (other,):
        introduced(nodes[0], [replace(other.endpoint.address(), tls_sha256="0" * 64)])
        done = command("ls", "--root", nodes[0].root)
    assert "host1 (node" in done.stdout
    assert "firewall" not in done.stdout
    step = "next step: set REPLICATED_CKPT_PLAIN (or `--plain`) on all nodes or on none"
    assert (step if is_plain else "next step for host1: An agent of another node than") in done.stdout, done.stdout


def test_shards_on_silent_nodes_are_not_called_lost(tmp_path: Path) -> None:
    """A shard that only silent nodes may hold is "not seen". A shard that no node can hold is "lost"."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    with agents(nodes, *PATIENT):
        pass
    done = command("ls", "--root", nodes[0].root)
    assert "1 file not seen: host1, host2 not reached" in line_of(done.stdout, "step-1")
    with agents(nodes[:1], *PATIENT):
        pass
    alone = LocalStore(tmp_path / "alone")
    checkpointed([alone], 2, {shard(0): (0,)}, copies=1)
    (alone.root / "step-1" / shard(0)).unlink()
    assert "1 file lost" in line_of(command("ls", "--root", alone.root).stdout, "step-1")


def test_start_agents_makes_this_node_reachable(tmp_path: Path) -> None:
    """The agent that `ls --start-agents` starts on one node answers the `ls` on another."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, *PATIENT):
        pass
    try:
        assert command("ls", "--root", nodes[1].root, "--start-agents", idle_s=60).returncode == ExitCode.OK
        done = command("ls", "--root", nodes[0].root)
        assert "2 of 2" in line_of(done.stdout, "step-1"), done.stdout
        assert "not reached" not in done.stdout
    finally:
        stop_agent(nodes[1].root)


def test_a_damaged_manifest_is_a_line(tmp_path: Path) -> None:
    """The other checkpoints are listed. If another node has the manifest, a line names the node that lacks it."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    checkpointed(nodes, 2, PAIR, checkpoint_id="step-2")
    checkpointed(nodes, 3, PAIR, checkpoint_id="step-3")
    for store in nodes:
        (store.root / "step-2" / ".manifest.json").write_text("{}")
    (nodes[0].root / "step-3" / ".manifest.json").write_bytes(b"\xff\n")
    done = command("ls", "--root", nodes[0].root)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "1 of 2" in line_of(done.stdout, "step-1")
    assert "manifest damaged" in line_of(done.stdout, "step-2")
    assert "manifest damaged" in line_of(done.stdout, "step-3")
    assert "2 with a damaged manifest" in done.stdout
    with agents(nodes[1:], *PATIENT) as (other,):
        introduced(nodes[0], [other.endpoint.address()])
        done = command("ls", "--root", nodes[0].root)
        assert "2 of 2" in line_of(done.stdout, "step-3"), done.stdout
        assert "its manifest of step-3 is damaged; `repair` restores it" in done.stdout
        assert "manifest damaged" in line_of(done.stdout, "step-2")
        printed = command("status", "--root", nodes[0].root).stdout
        assert ": its manifest of step-3 is damaged; `repair` restores it" in printed.partition("NODE")[0], printed
        printed = command("verify", "--root", nodes[0].root).stdout
        assert f"next step: `replicated-ckpt repair --root {nodes[0].root}` does this now." in printed, printed
        json.loads(command("ls", "--root", nodes[0].root, "-o", "json").stdout)


@pytest.mark.parametrize("words", [["ls"], ["show", "step-1"], ["verify"], ["repair", "--dry-run"], ["status"]])
def test_a_manifest_that_no_node_can_restore_has_a_next_step(tmp_path: Path, words: list[str]) -> None:
    """Each command prints how the manifest may be restored, and how to remove the checkpoint."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    (node.root / "step-1" / ".manifest.json").write_text("{}")
    done = command(*words, "--root", node.root)
    assert "next step for step-1: start the agent of another node that has it" in done.stdout, done.stdout
    assert f"`replicated-ckpt repair --root {node.root}`" in done.stdout
    assert f"`rm -r step-1` in the root of {node.node_id()}" in done.stdout


def test_a_name_in_a_next_step_is_one_word_of_a_shell(tmp_path: Path) -> None:
    """A name that a peer chose is quoted: a pasted command runs nothing else."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1, checkpoint_id="a b; reboot")
    (node.root / "a b; reboot" / ".manifest.json").write_text("{}")
    assert "`rm -r 'a b; reboot'` in the root of" in command("ls", "--root", node.root).stdout
    refused = command("rm", "a b; reboot", "--root", node.root, "--force")
    assert f"`rm -r '{node.root}/a b; reboot'`" in refused.stderr
    stop_agent(node.root)


def seen_as(state: str, bucket: str = "") -> CheckpointSeen:
    return CheckpointSeen("step-1", state, ("n",), bucket=bucket)


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        ([seen_as(LOST), seen_as(WHOLE)], "Another version also has this name"),
        ([seen_as(LOST, bucket="there")], "load it with object_store="),
    ],
)
def test_other_versions_are_mentioned_before_a_removal(rows: list[CheckpointSeen], step: str) -> None:
    """An intact version under the same name, or one in a bucket, is mentioned before a removal."""
    (line,) = advise(rows, NodesSeen("n", {}, {}, {}, {}), Path("/r"))
    assert step in line
    assert len(rows) == 1 or "`replicated-ckpt rm step-1 --root /r --save " in line, "only this version"


def test_the_next_step_names_the_node_with_the_rest() -> None:
    """After `rm` on this node, the next step names the node that still has the rest."""
    row = replace(seen_as(LOST), nodes=("m",), removed_on=("n",))
    (line,) = advise([row], NodesSeen("n", {}, {"m": AgentAddress("m", "host1", 1, "")}, {}, {}), Path("/r"))
    assert line.endswith("or remove the rest of it on host1: `ssh host1 'replicated-ckpt rm step-1 --root /r'`")


def test_several_lost_nodes_are_replaced_by_as_many() -> None:
    """Two lost nodes need two new ones, as one node cannot hold two copies."""
    addresses = {node: AgentAddress(node, f"host-{node}", 1, "") for node in "bc"}
    (line,) = advise_on_lost(NodesSeen("a", {"a": NodeHoldings(())}, addresses, {}, {}), Path("/r"), ["b", "c"], 2)
    assert line.startswith("if host-b, host-c never come back: run the job with as many new nodes, which receive")
    assert line.endswith("the copies of what other nodes still have, as 1 node cannot hold 2 copies")


def test_nodes_with_the_only_copies_are_lost_in_one_command(tmp_path: Path) -> None:
    """Two nodes with all copies of a shard are lost: one command names both. `ls`, `repair` and `forget` name the
    bucket.
    """
    url = f"file://{tmp_path}/bucket"
    nodes = stores(tmp_path, 4)
    checkpointed(nodes, 1, {shard(0): (0, 3), shard(1): (1, 2), shard(2): (3, 2)}, url=url)
    where, gone = ("--root", nodes[0].root), sorted(node.node_id() for node in nodes[1:3])
    for node in nodes:
        UploadBook(node.agent_directory()).learn(ObjectTarget.check_supported(url, {}))
    step = f"next step for step-1: load with object_store={url!r}, which has all files"
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: as_json("ls", *where)[1]["checkpoints"][0]["bucket"] == "there", 60, "the upload")
        for agent, node in zip(running[1:3], nodes[1:3], strict=True):
            agent.signal(signal.SIGKILL)
            agent.process.wait()
            shutil.rmtree(node.root)
        done = command("ls", *where)
        both = f"replicated-ckpt repair --root {nodes[0].root} --lost {gone[0]} --lost {gone[1]}"
        assert f"if host1, host2 never come back: `{both}` makes new copies of what other nodes" in done.stdout
        assert step in done.stdout
        done = command(*both.split()[1:])
        assert f"lost: step-1/{shard(1)} " in done.stdout
        assert f": copy step-1/{shard(2)} " in done.stdout, done.stdout
        assert step in done.stdout
        done = command("forget", gone[0], *where)
        assert f"would be lost: step-1: {shard(1)}: " in done.stdout
        assert done.stdout.endswith(f"{step}\n")


def test_files_that_are_lost_have_a_next_step(tmp_path: Path) -> None:
    """The next step is to load an older checkpoint, and the command that removes this one."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    (node.root / "step-1" / shard(0)).unlink()
    done = command("ls", "--root", node.root)
    assert "next step for step-1: load an older checkpoint" in done.stdout, done.stdout
    step = f"replicated-ckpt rm step-1 --root {node.root}"
    assert f"`{step}`" in done.stdout
    assert command(*step.split()[1:], "--force").returncode == ExitCode.OK
    stop_agent(node.root)


def test_repair_speaks_only_for_the_nodes_that_answered(tmp_path: Path) -> None:
    """With a silent node, `repair` says that only the nodes that answered need no repair."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes[1:], *PATIENT) as (other,):
        introduced(nodes[0], [other.endpoint.address()])
    done = command("repair", "--dry-run", "--root", nodes[0].root)
    assert done.returncode == ExitCode.UNREACHABLE
    assert "nothing to repair on the nodes that answered\n" in done.stdout, done.stdout
    assert "if host1 never comes back: run the job with a new node in its place" in done.stdout


def test_a_checkpoint_is_not_short_for_lack_of_nodes(tmp_path: Path) -> None:
    """Two copies are wanted, and there is one node: `ls` prints that, and does not count the checkpoint as short."""
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=2)
    done = command("ls", "--root", store.root)
    assert "1 of 2, as there is 1 node" in line_of(done.stdout, "step-1")
    assert "fewer copies" not in done.stdout
    assert command("verify", "--root", store.root).returncode == ExitCode.OK
