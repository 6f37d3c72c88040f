"""One command for all nodes: which nodes it asks, with which right, and what it removes where."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shlex import quote
from types import SimpleNamespace

import pytest

from replicated_ckpt.agent.state.rights import INVITATION_S, Right, Tokens, read_owner_key, show_key
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look import given_nodes
from replicated_ckpt.cli.look.given_nodes import as_owner
from replicated_ckpt.errors import AgentUnavailable, ConfigInvalid
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.peer.tls import pin_name
from tests.agent.agents import HOME, RunningAgent, running_agent, stop_agent
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import PAIR, agents, meet, stores
from tests.agent.repair.test_retention import steps_in
from tests.cli.commands import MAIN, as_json, command
from tests.cli.removal.test_removal import QUICK, saved

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
KEY_ENV = "REPLICATED_CKPT_OWNER_KEY"
THREE = {shard(0): (0, 1), shard(1): (1, 2), shard(2): (2, 0)}


def key_file(folder: Path, text: str = "k" * 64, mode: int = 0o600) -> str:
    path = folder / f"{text[:1]}.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@contextmanager
def keyed_agent(monkeypatch: pytest.MonkeyPatch, root: Path, key: str, *options: str) -> Iterator[RunningAgent]:
    """An agent that was started with this key file."""
    monkeypatch.setenv(KEY_ENV, key)
    with running_agent(root, *QUICK, *options) as agent:
        yield agent


def test_one_command_removes_on_every_node_with_the_users_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose agent has another key, or none, keeps its part. The output names the node and the next step."""
    nodes = stores(tmp_path, 3)
    for number in (1, 2, 3):
        checkpointed(nodes, number, THREE, checkpoint_id=f"step-{number}", size_bytes=3000)
    ours, theirs = key_file(tmp_path), key_file(tmp_path, "x" * 64)
    with (
        keyed_agent(monkeypatch, nodes[0].root, ours) as a,
        keyed_agent(monkeypatch, nodes[1].root, ours) as b,
        keyed_agent(monkeypatch, nodes[2].root, theirs) as c,
    ):
        meet(a, b, c)
        monkeypatch.setenv(KEY_ENV, ours)
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert (done.returncode, done.stderr) == (ExitCode.FAILED, "")
        assert [steps_in(store) for store in nodes] == [[2, 3], [2, 3], [1, 2, 3]]
        assert f"removed on host1 (node {nodes[1].node_id()}): step-1" in done.stdout
        assert f"still on host2 (node {nodes[2].node_id()}): step-1: its agent was not started with this" in done.stdout
        assert f"`ssh host2 'replicated-ckpt rm step-1 --root {nodes[0].root}'`" in done.stdout
        monkeypatch.delenv(KEY_ENV)
        done = command("prune", "--keep-last", "1", "--root", nodes[0].root, "--dry-run")
        assert f"the command removes from this node alone, as {KEY_ENV} is not set" in done.stdout
        monkeypatch.setenv(KEY_ENV, ours)
        code, found = as_json("prune", "--keep-last", "1", "--root", nodes[0].root)
        assert (code, found["removed_on"]) == (ExitCode.FAILED, {nodes[1].node_id(): ["step-2"]})
        assert [steps_in(store) for store in nodes] == [[3], [3], [1, 2, 3]]


def test_a_checkpoint_that_another_node_loads_stays_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node is asked before the first copy is removed."""
    nodes = stores(tmp_path, 2)
    first, _ = saved(nodes, (1, 2))
    monkeypatch.setenv(KEY_ENV, key_file(tmp_path))
    with agents(nodes, *QUICK) as running:
        with running[1].client() as client:
            client.call("POST", "/v1/sequence", {"lineage": "", "sequence": 1, "save_id": first, "reader": "a load"})
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert (done.returncode, [steps_in(store) for store in nodes]) == (ExitCode.FAILED, [[1, 2], [1, 2]])
        assert f"kept: step-1: on host1 (node {nodes[1].node_id()}): a load reads it" in done.stdout
        code, found = as_json("rm", "step-1", "--root", nodes[0].root, "--force")
        assert (code, found["removed"], found["removed_on"]) == (0, ["step-1"], {nodes[1].node_id(): ["step-1"]})
        assert [steps_in(store) for store in nodes] == [[2], [2]]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["plain", "tls"])
def test_an_unknown_node_is_asked_with_the_users_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Without the key no request is sent to an unknown node. An agent with another key is refused."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    ours, theirs = key_file(tmp_path), key_file(tmp_path, "x" * 64)
    with keyed_agent(monkeypatch, nodes[1].root, ours, "--host", host) as b:
        assert bool(b.endpoint.tls_sha256) == (host == "0.0.0.0")
        at = f"127.0.0.1:{b.endpoint.port}"
        for verb in ("ls", "status", "verify"):
            done = command(verb, "--root", nodes[0].root, "--nodes", at)
            assert "1 of 2 copies" not in done.stdout, done.stdout
            assert "not reached" not in done.stdout, done.stdout
            assert done.returncode == ExitCode.OK, done.stdout + done.stderr
        monkeypatch.setenv(KEY_ENV, theirs)
        done = command("ls", "--root", nodes[0].root, "--nodes", at)
        assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, "")
        assert "it was not started with this user's key file" in done.stderr
        monkeypatch.delenv(KEY_ENV)
        done = command("ls", "--root", nodes[0].root, "--nodes", at)
        assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
        assert f"No address book here has a node at {at}" in done.stderr
        assert KEY_ENV in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["plain", "tls"])
def test_a_machine_without_a_store_asks_the_named_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """All read-only commands work with `--nodes`. An agent that is down is reported, and the others are listed."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, THREE, size_bytes=3000)
    key, asked = key_file(tmp_path), ("ls", "show latest", "status", "verify", "report latest")
    with (
        keyed_agent(monkeypatch, nodes[0].root, key, "--host", host) as a,
        keyed_agent(monkeypatch, nodes[1].root, key, "--host", host) as b,
        keyed_agent(monkeypatch, nodes[2].root, key, "--host", host) as c,
    ):
        ports = [one.endpoint.port for one in (a, b, c)]
        at = ",".join(f"127.0.0.1:{port}" for port in ports)
        done = {verb: command(*verb.split(), "--nodes", at) for verb in asked}
        assert "2 of 2" in done["ls"].stdout
        assert "3 of 3 nodes answered" in done["ls"].stdout
        assert "saved at:" in done["show latest"].stdout
        assert done["status"].stdout.startswith("good\n"), done["status"].stdout
        assert "1 checkpoint, 3 of 3 nodes, " in done["verify"].stdout
        assert "No node that was reached has a report of a save or load of 'step-1'" in done["report latest"].stderr
        codes = [done[verb].returncode for verb in asked]
        assert codes == [ExitCode.OK] * 4 + [ExitCode.NOT_FOUND], done
        two = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        assert "1 of 2 copies seen" in (printed := command("ls", "--nodes", two).stdout)
        assert "next step: host2 was not asked: name its agent with --nodes, too" in printed, printed
        checked = command("verify", "--nodes", two)
        assert checked.returncode == ExitCode.UNREACHABLE, checked
        assert checked.stdout.rstrip().endswith("all that was read is intact; 1 other node of it not asked"), checked
        stop_agent(nodes[2].root)
        done = {verb: command(*verb.split(), "--nodes", at) for verb in asked}
        for verb in asked:
            assert f"127.0.0.1:{ports[2]}" in done[verb].stdout + done[verb].stderr, (verb, done[verb])
            assert "no-store" not in done[verb].stdout + done[verb].stderr, (verb, done[verb])
            assert "this node" not in done[verb].stdout + done[verb].stderr, (verb, done[verb])
        assert "2 of 3 nodes answered" in done["ls"].stdout
        assert [done[verb].returncode for verb in asked] == [0, 0, ExitCode.FAILED, ExitCode.UNREACHABLE, 5]
    done["ls"] = command("ls", "--nodes", at)
    assert (done["ls"].returncode, done["ls"].stdout) == (ExitCode.UNREACHABLE, "")


@pytest.mark.parametrize("words", [("status",), ("ls",), ("status", "--own-agent", "--nodes", "a:1")])
def test_a_command_without_a_store_names_what_it_can_ask(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names `--root` and `--nodes`. `--own-agent` needs a root."""
    monkeypatch.delenv("REPLICATED_CKPT_ROOT", raising=False)
    done = command(*words)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "Name a node's store with --root or REPLICATED_CKPT_ROOT, or agents with --nodes" in done.stderr


class _FakeAgent(BaseHTTPRequestHandler):
    """Answers any token like an agent, but does not have the key."""

    def do_GET(self) -> None:
        body = json.dumps({"node_id": "n" * 32, "incarnation": 1, "proof": "0" * 64, "holdings": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_an_agent_that_cannot_prove_the_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process on the agent's port could make up the output of the command."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    monkeypatch.setenv(KEY_ENV, key_file(tmp_path))
    with HTTPServer(("127.0.0.1", 0), _FakeAgent) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        done = command("ls", "--root", nodes[0].root, "--nodes", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, "")
    assert "it does not prove that it has this user's key file" in done.stderr


def test_a_token_of_the_key_is_valid_for_one_certificate(tmp_path: Path) -> None:
    """An agent that receives the token cannot use it for another agent, and the token expires."""
    key, one, other = "k" * 64, "1" * 64, "2" * 64
    tokens = Tokens("peer", "owner", key, lambda: [pin_name(one)])
    assert tokens.right_of(show_key(key, one, time.time())) is Right.OWNER
    assert tokens.right_of(show_key(key, other, time.time())) is None
    assert tokens.right_of(show_key("x" * 64, one, time.time())) is None
    assert tokens.right_of(show_key(key, one, time.time() - INVITATION_S - 1)) is None
    assert Tokens("peer", "owner").right_of(show_key("", "", time.time())) is None


def test_no_other_user_of_this_host_gets_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user listens on the agent's port on loopback, where there may be no certificate: no token is sent."""
    at = AgentAddress("b", "127.0.0.1", 29600, "")
    monkeypatch.setattr(given_nodes, "listeners_on", lambda _: [SimpleNamespace(uid=os.geteuid() + 1)])
    with pytest.raises(AgentUnavailable, match="no token was sent"):
        as_owner(at, "k" * 64)
    monkeypatch.setattr(given_nodes, "listeners_on", lambda _: [SimpleNamespace(uid=os.geteuid())])
    assert as_owner(at, "k" * 64).token


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [("k" * 64, 0o640, "other users may read"), ("short", 0o600, "it must hold 32"), (None, 0, "cannot be read")],
)
def test_a_key_file_that_is_not_safe_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, mode: int, why: str
) -> None:
    """The error names the file, and how to make one."""
    path = str(tmp_path / "absent") if text is None else key_file(tmp_path, text, mode)
    monkeypatch.setenv(KEY_ENV, path)
    with pytest.raises(ConfigInvalid, match=why) as found:
        read_owner_key()
    assert path in str(found.value)
    assert "openssl rand -hex 32" in found.value.hint


def test_after_a_job_ls_prints_the_command_that_starts_all_agents(tmp_path: Path) -> None:
    """The agents have exited: `ls` prints a line that starts them by SSH."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, THREE)
    with agents(nodes, *QUICK) as running:
        for agent in running:
            agent.signal(signal.SIGTERM)
            agent.process.wait(20)
    for verb in ("ls", "status"):
        done = command(verb, "--root", nodes[0].root)
        wake = f"replicated-ckpt status --own-agent --start-agents --root {nodes[0].root}"
        line = f"`for host in host1 host2; do ssh $host '{wake}'; done`"
        assert verb == "status" or line in done.stdout, done.stdout


def test_after_a_job_one_command_starts_all_agents(tmp_path: Path) -> None:
    """`--rsh` gets a host and a command. A host where it fails is reported, and the others are listed."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, THREE)
    rsh = tmp_path / "rsh"
    # Like the command on each host, but with the host's own address, as all hosts are one machine.
    start = f"PYTHONPATH={HOME} {sys.executable} -m replicated_ckpt.agent --host $1 --idle-exit-s 3"
    rsh.write_text(
        f"#!/bin/sh\necho $2 >> {tmp_path}/asked\n[ $1 = 127.0.0.4 ] && {{ echo no route >&2; exit 255; }}\n"
        f"root={tmp_path}/node$((${{1##*.}} - 2))\n{start} --root $root > /dev/null 2>&1 &\n"
        "while [ ! -s $root/.agent/endpoint.json ]; do sleep 0.05; done\n"
    )
    rsh.chmod(0o755)
    with ExitStack() as stack:
        hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
        running = [
            stack.enter_context(running_agent(node.root, *QUICK, "--host", host))
            for node, host in zip(nodes, hosts, strict=True)
        ]
        meet(*running)
        for agent in reversed(running):  # so the first agent has seen the others end
            agent.signal(signal.SIGTERM)
            agent.process.wait(20)
    done = command("ls", "--root", nodes[0].root, "--start-agents", "--rsh", rsh, idle_s=3)
    for store in nodes[:2]:
        stop_agent(store.root)
    assert done.returncode == ExitCode.OK
    assert "started no agent: it ended with 255: no route" in done.stderr
    asked = f"replicated-ckpt status --own-agent --start-agents --root {nodes[0].root}"
    assert (tmp_path / "asked").read_text().splitlines() == [asked, asked]
    assert f"host2 (node {nodes[2].node_id()}): not reached" in done.stdout
    assert "host1" in done.stdout.splitlines()[1]
    assert f"host1 (node {nodes[1].node_id()}): not reached" not in done.stdout


def test_an_agent_that_was_started_at_an_unknown_address_is_reported(tmp_path: Path) -> None:
    """A node has lost its address book: its new agent announces itself to no one, and the command prints that."""
    nodes, rsh = stores(tmp_path, 2), tmp_path / "rsh"
    checkpointed(nodes, 1, PAIR)
    start = f"-c {quote(MAIN)} status --own-agent --start-agents --root {nodes[1].root}"
    rsh.write_text(f"#!/bin/sh\nPYTHONPATH={HOME} {sys.executable} {start}\n")
    rsh.chmod(0o755)
    with (
        running_agent(nodes[0].root, *QUICK) as one,
        running_agent(nodes[1].root, *QUICK, "--host", "127.0.0.3") as two,
    ):
        meet(one, two)
        for agent in (two, one):
            agent.signal(signal.SIGTERM)
            agent.process.wait(20)
    (nodes[1].agent_directory() / "peers.json").write_text("[")
    done = command("ls", "--root", nodes[0].root, "--start-agents", "--rsh", rsh, idle_s=3)
    for store in nodes:
        stop_agent(store.root)
    assert (
        f"An agent runs on 127.0.0.3, but not at 127.0.0.3:{two.endpoint.port}, the address that this node has."
        in done.stderr
    )
    assert "Hint: The next save or load of a job with ranks on both nodes introduces them." in done.stderr
