"""`verify` finds every damage and changes nothing. `repair` prints a plan, and carries out exactly that plan."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.errors import ConfigInvalid, PeerProtocolError
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import peers_of, running_agent
from tests.agent.checkpoints import checkpointed, findings, held, introduced, quarantined, shard
from tests.agent.repair.test_reprotect import PAIR, RING, agents, stores
from tests.cli import commands
from tests.damage import flip

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


def command(verb: str, root: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return commands.command(verb, "--root", root, *options)


def as_json(verb: str, root: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = command(verb, root, "-o", "json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def tree(root: Path) -> dict[str, bytes]:
    """All files under a root except the agent's own."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".agent", "agent.out"} & set(path.relative_to(root).parts)
    }


def test_an_intact_store_is_reported_as_intact(tmp_path: Path) -> None:
    """The exit code is 0, there is no finding, and every byte of both nodes was read."""
    nodes = stores(tmp_path, 2)
    manifest = checkpointed(nodes, 1, PAIR)
    with agents(nodes):
        code, found = as_json("verify", nodes[0].root)
    assert (code, found["findings"], found["unreachable"], found["is_intact"]) == (ExitCode.OK, [], [], True)
    shards = sum(entry.size_bytes for entry in manifest.shards.values())
    assert [node["bytes_read"] for node in found["nodes"]] == [shards + manifest.metadata_bytes] * 2


def test_verify_names_every_bad_file_and_changes_nothing(tmp_path: Path) -> None:
    """Each finding has node, path, expected and found value, for all nodes. No file changes."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    checkpointed(nodes, 2, PAIR, checkpoint_id="run/step-2")
    flip(nodes[0].root / "step-1" / shard(0), 1000)
    (nodes[0].root / "run/step-2" / ".metadata").unlink()
    (nodes[1].root / "run/step-2" / shard(1)).write_bytes(b"")
    (nodes[1].root / "step-1" / ".manifest.json").write_text("{}")
    with running_agent(nodes[1].root, "--lost-after-s", "600") as other:  # without a peer that could restore files
        introduced(nodes[0], [other.endpoint.address()])
        before = [tree(store.root) for store in nodes]
        done = command("verify", nodes[0].root)
        code, found = as_json("verify", nodes[0].root)
        assert [tree(store.root) for store in nodes] == before
    assert done.returncode == code == ExitCode.FAILED
    listed = {(finding["node_id"], finding["path"], finding["problem"]) for finding in found["findings"]}
    ids = [store.node_id() for store in nodes]
    assert listed == {
        (ids[0], str(nodes[0].root / "step-1" / shard(0)), "corrupt"),
        (ids[0], str(nodes[0].root / "run/step-2/.metadata"), "missing"),
        (ids[1], str(nodes[1].root / "run/step-2" / shard(1)), "corrupt"),
        (ids[1], str(nodes[1].root / "step-1/.manifest.json"), "corrupt"),
    }
    for node, path, _ in listed:
        where = f"{path} on host{ids.index(node)} (node {node}): expected"
        assert any(where in line for line in done.stdout.splitlines())


def test_an_unknown_lost_node_is_a_usage_error(tmp_path: Path) -> None:
    """An unknown id after --lost is a usage error, and nothing is carried out. A node that only a manifest names is
    accepted.
    """
    node, gone = stores(tmp_path, 2)
    checkpointed([node, gone], 1, PAIR)
    before = tree(node.root)
    done = command("repair", node.root, "--lost", "xyz", "--lost", gone.node_id())
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "--lost xyz: no known node has that id or host" in done.stderr
    assert tree(node.root) == before
    for named in (gone.node_id(), "host1"):
        done = command("repair", node.root, "--dry-run", "--lost", named)
        assert (done.returncode, done.stderr) == (ExitCode.OK, ""), named


def test_repair_does_what_its_dry_run_says(tmp_path: Path) -> None:
    """`--dry-run` prints the plan and changes nothing. `repair` carries it out, and keeps the damaged files in the
    quarantine.
    """
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    flip(nodes[0].root / "step-1" / shard(0), 1000)
    (nodes[1].root / "step-1" / ".metadata").write_bytes(b"bad")
    before = [tree(store.root) for store in nodes]
    with running_agent(nodes[1].root, "--lost-after-s", "600") as other:
        introduced(nodes[0], [other.endpoint.address()])
        with running_agent(nodes[0].root) as agent, other.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(agent)})
        code, plan = as_json("repair", nodes[0].root, "--dry-run")
        assert code == ExitCode.OK
        assert [tree(store.root) for store in nodes] == before
        assert [(entry["shard"], entry["replaces_damaged"]) for entry in plan["plan"]["copy"]] == [(shard(0), True)]
        assert [entry["node_id"] for entry in plan["plan"]["restore"]] == [nodes[1].node_id()]
        done = command("repair", nodes[0].root)
        assert (done.returncode, done.stderr) == (ExitCode.OK, "")
        assert "2 of 2 actions done" in done.stdout
        one, two = (f"host{number} (node {store.node_id()})" for number, store in enumerate(nodes))
        assert f"to do: {one}: replace the damaged step-1/{shard(0)} " in done.stdout
        assert f"to do: {two}: copy step-1 (manifest, metadata) from {one}" in done.stdout
        assert command("verify", nodes[0].root).returncode == ExitCode.OK
        assert "nothing to repair" in command("repair", nodes[0].root).stdout
    assert [findings(store) for store in nodes] == [[], []]
    assert [quarantined(store) for store in nodes] == [[shard(0)], [".metadata"]]


def test_a_damaged_last_copy_stays_in_place(tmp_path: Path) -> None:
    """A damaged last copy stays in place. A shard without any other copy is reported as lost, with an exit code of its
    own.
    """
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    for store in nodes:
        flip(store.root / "step-1" / shard(0), 1000)
    with agents(nodes):
        assert (
            command("verify", nodes[0].root).returncode == ExitCode.FAILED
        )  # two damaged copies may complete each other
        done = command("repair", nodes[0].root)
        assert done.returncode == ExitCode.FAILED
        assert "no intact bytes" in done.stdout
    assert all((store.root / "step-1" / shard(0)).exists() for store in nodes)
    assert [quarantined(store) for store in nodes] == [[], []]
    (nodes[1].root / "step-1" / shard(0)).unlink()
    with agents(nodes):
        done = command("verify", nodes[0].root)
    assert done.returncode == ExitCode.SHARD_LOST
    assert f"lost: step-1/{shard(0)}" in done.stdout


def test_an_unreachable_node_is_neither_lost_nor_intact(tmp_path: Path) -> None:
    """The copies of an unreachable node are made again only after `repair --lost`."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    with agents(nodes, "--lost-after-s", "600") as running:
        gone = nodes[2].node_id()
        running[2].signal(signal.SIGKILL)
        running[2].process.wait()
        shutil.rmtree(nodes[2].root)
        code, found = as_json("verify", nodes[0].root)
        assert code == ExitCode.UNREACHABLE
        assert any(gone in line for line in found["unreachable"])
        assert command("repair", nodes[0].root, "--dry-run").returncode == ExitCode.UNREACHABLE
        assert command("repair", nodes[0].root, "--lost", gone).returncode == ExitCode.OK
    assert [held(store) for store in nodes[:2]] == [set(RING), set(RING)]


def test_a_missing_root_or_checkpoint_is_not_found(tmp_path: Path) -> None:
    """A missing root and a missing checkpoint have an exit code of their own."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    assert command("verify", tmp_path / "nowhere").returncode == ExitCode.NOT_FOUND
    for verb in ("repair", "verify"):
        assert command(verb, store.root, "step-9").returncode == ExitCode.NOT_FOUND
        assert command(verb, store.root, "latest").returncode == ExitCode.OK, "latest is step-1"
    assert command("verify", store.root, "step-1").returncode == ExitCode.OK
    assert not (store.root / ".agent" / "endpoint.json").exists(), "neither command starts an agent without work"
    introduced(store, [AgentAddress("gone", "127.0.0.1", 1, "token")])
    assert command("repair", store.root, "step-9").returncode == ExitCode.UNREACHABLE, "the other node may have step-9"


def test_agents_refuse_invalid_requests(tmp_path: Path) -> None:
    """An invalid plan, suspect or greeting is refused, and changes nothing."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    with running_agent(nodes[0].root) as agent:
        before = tree(nodes[0].root)
        copy: dict[str, Any] = {
            "node_id": nodes[0].node_id(),
            "checkpoint_id": "../x",
            "save_id": "1" * 32,
            "shard": shard(0),
        }
        copy |= {"size_bytes": 1, "sources": ["x"], "replaces_damaged": False}
        restore = {"node_id": nodes[0].node_id(), "checkpoint_id": "..", "save_id": "../../x", "sources": ["x"]}
        bad: list[tuple[str, dict[str, Any], bool]] = [
            ("repair", {"plan": {"restore": [], "copy": 5, "set_aside": []}}, True),
            ("repair", {"plan": {"restore": [restore], "copy": [copy], "short": []}}, False),
            ("suspects", {"checkpoint_id": "..", "save_id": "1" * 32, "name": shard(0)}, True),
            ("suspects", {"checkpoint_id": "step-1", "save_id": "1" * 32, "name": "../../etc/passwd"}, True),
            ("hello", {"peer": {**peers_of(agent)[0], "node_id": "../x"}}, True),
            ("verify", {"checkpoint_id": "../.."}, True),
        ]
        for verb, document, is_refused in bad:
            with agent.client() as client:
                if is_refused:
                    with pytest.raises((ConfigInvalid, PeerProtocolError)):
                        client.call("POST", f"/v1/{verb}", document)
                else:
                    results = client.call("POST", f"/v1/{verb}", document)["results"]
                    assert all(result["error"] for result in results)
        assert tree(nodes[0].root) == before


def test_verify_advises_to_combine_damaged_copies(tmp_path: Path) -> None:
    """Each block is intact on one of the nodes: `verify` prints the `repair` command that combines them."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR, size_bytes=3 * BLOCK_BYTES)
    for block, node in enumerate(nodes):
        flip(node.root / "step-1" / shard(0), block * BLOCK_BYTES)
    with agents(nodes):
        done = command("verify", nodes[0].root)
        step = f"replicated-ckpt repair --root {nodes[0].root}"
        assert f"next step for step-1: `{step}`, which combines the intact blocks" in done.stdout, done.stdout
        assert command("repair", nodes[0].root).returncode == ExitCode.OK
        assert command("verify", nodes[0].root).returncode == ExitCode.OK
