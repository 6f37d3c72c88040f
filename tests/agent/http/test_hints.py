"""Hints: an error of an agent arrives with its hint, and an unreachable agent is reported with the cause."""

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from replicated_ckpt.agent.http.server import status_of
from replicated_ckpt.agent.state.listeners import describe_listeners
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.dcp.agreement.node_post import find_host
from replicated_ckpt.environment import HOST_ENV
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    MetadataUnsafe,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    SaveAborted,
    SaveSuperseded,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.durable import store_error_of
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import refusal
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from tests.agent.agents import HOME, peers_of, running_agent, stop_agent
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import stores
from tests.agent.repair.test_verify_repair import command
from tests.cli.commands import MAIN
from tests.damage import flip
from tests.harness.launch import base_environment

HINT = "Turn the key to the left."


@pytest.mark.parametrize(
    "error",
    [
        ConfigInvalid("m.", HINT),
        CheckpointExists("m.", HINT),
        SaveAborted("m.", HINT),
        SaveSuperseded("m.", HINT),
        PeerProtocolError("m.", HINT),
        MetadataUnsafe("m.", HINT),
        StoreError("/nvme", "write", "x", "OSError: Input/output error", HINT),
        ObjectMissing("/nvme", "read", "x", "", HINT),
        ObjectCorrupt("/nvme", "read", "x", "", HINT),
        StoreDenied("/nvme", "read", "x", "", HINT),
        StoreFull("/nvme", "write", "x", "", HINT),
        StoreUnavailable("/nvme", "write", "x", "", HINT),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_agents_error_arrives_unchanged(error: ReplicatedCkptError) -> None:
    """An error of an agent arrives with its class, message and hint."""
    raw = json.dumps({"error": error.message, "kind": type(error).__name__, "hint": error.hint}).encode()
    arrived = refusal(status_of(error), raw, "node b at 10.0.0.2:1", "POST", "/v1/x")
    assert type(arrived) is type(error)
    assert arrived.hint == HINT
    assert error.message.rstrip(".") in arrived.message
    assert "node b at 10.0.0.2:1" in arrived.message


def test_an_error_class_must_match_the_status() -> None:
    """The answer names an error class that does not match its HTTP status: the caller raises PeerProtocolError."""
    raw = json.dumps({"error": "m", "kind": "StoreFull", "hint": HINT}).encode()
    assert type(refusal(400, raw, "node b", "POST", "/")) is PeerProtocolError
    assert type(refusal(599, raw, "node b", "POST", "/")) is PeerProtocolError


def test_a_rank_gets_the_agents_own_hint(tmp_path: Path) -> None:
    """A real agent refuses a request: the caller gets the hint for this case."""
    document = {"checkpoint_id": "step-1", "session": "s", "overwrite": False}
    with running_agent(tmp_path / "a") as agent, agent.client() as client:
        (tmp_path / "a" / "step-1").write_text("a user's file")
        with pytest.raises(ConfigInvalid, match="is not a directory") as taken:
            client.call("POST", f"/v1/saves/{1:032x}", {**document, "peers": peers_of(agent)})
        assert "move that directory away on every node" in taken.value.hint
        with pytest.raises(ConfigInvalid, match="environment") as invalid:
            client.call("POST", "/v1/object/target", {"url": "s3://b/x", "options": {}, "environment": {"A": "b"}})
        assert invalid.value.hint == "Pass what the client needs as storage_options."


# Addresses -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def unreachable_error(address: AgentAddress) -> StoreUnavailable:
    with AgentClient(address, 1) as client, pytest.raises(StoreUnavailable) as raised:
        client.call("GET", "/v1/status")
    return raised.value


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "no process listens on its port"), ("no-such-host.invalid", "cannot resolve the name")],
)
def test_a_wrong_address_is_named_with_its_origin(host: str, why: str) -> None:
    """The error has the address, its origin, the variable that corrects the address, and the port that must be open."""
    port = free_port()
    address = AgentAddress("b", host, port, "t", tls_sha256="0" * 64, origin="REPLICATED_CKPT_HOST on host-b")
    error = unreachable_error(address)
    assert why in error.hint
    assert f"{host}:{port} comes from REPLICATED_CKPT_HOST on host-b" in error.hint
    assert f"port {port} is open" in error.hint
    assert f"set {HOST_ENV} to that" in error.hint
    assert f"{host}:{port}" in error.message


def test_an_address_has_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin of an address is the variable, or the route to the coordinator."""
    monkeypatch.setenv(HOST_ENV, "10.1.2.3")
    host, origin = find_host()
    assert (host, origin) == ("10.1.2.3", f"{HOST_ENV} on {socket.gethostname()}")
    monkeypatch.delenv(HOST_ENV)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    host, origin = find_host()
    assert host == "127.0.0.1"
    assert "MASTER_ADDR=127.0.0.1" in origin


_IPV6_ALONE = "ip link set lo up && ip -6 address add 2001:db8:1::5/128 dev lo nodad && ip -6 route add default dev lo"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="a network of its own needs root and `ip`")
def test_a_host_without_ipv4_is_reached_by_the_route_that_it_has() -> None:
    """An IPv6-only host gets the address of its default route, also where the coordinator's name resolves to loopback."""
    ask = "from replicated_ckpt.dcp.agreement.node_post import find_host; print(find_host()[0])"
    command = f'{_IPV6_ALONE} && exec {shlex.quote(sys.executable)} -c "{ask}"'
    name_of_loopback = {"MASTER_ADDR": "127.1"}  # not a strict IPv4 address, so it is looked up as a name
    environment = {key: value for key, value in base_environment().items() if key != HOST_ENV} | name_of_loopback
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["2001:db8:1::5"], done.stderr


def test_an_address_book_keeps_the_origin_of_an_address(tmp_path: Path) -> None:
    """The origin of an address names the book, and the first origin survives writing the book and copying it to other
    nodes. An earlier release sends no origin.
    """
    book = PeerBook(LocalStore(tmp_path / "a").agent_directory())
    given = AgentAddress("b", "127.0.0.1", 9, "t", origin="REPLICATED_CKPT_HOST on host-b")
    book.learn([given])
    book.learn([AgentAddress("c", "127.0.0.1", 10, "t")])
    book.leave("b")
    (first, second) = PeerBook(LocalStore(tmp_path / "a").agent_directory()).read_all()
    path = tmp_path / "a" / ".agent" / "peers.json"
    assert first.origin == f"the address book {path}, which has it from REPLICATED_CKPT_HOST on host-b"
    assert second.origin == f"the address book {path}"
    assert str(path) in unreachable_error(first).hint
    other = PeerBook(LocalStore(tmp_path / "other").agent_directory())
    other.learn([first, second])  # as a load copies addresses from one node's book to another
    handed_on = {
        peer.node_id: peer.origin.removeprefix(f"the address book {tmp_path}/other/.agent/peers.json")
        for peer in other.read_all()
    }
    assert handed_on == {"b": ", which has it from REPLICATED_CKPT_HOST on host-b", "c": ""}
    fields = {name: value for name, value in first.to_json().items() if name != "origin"}
    assert AgentAddress.from_json(fields) == first
    assert AgentAddress.from_json({**fields, "origin": "x\ny" * 1000}).origin.isprintable()


# Ports ---------------------------------------------------------------------------------------------------------------


def test_a_taken_port_names_its_process(tmp_path: Path) -> None:
    """The error has the pid and command of the process that uses the port, and how to choose another port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        arguments = ["--root", str(tmp_path / "a"), "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(HOME)}
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "agent", *arguments],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == ExitCode.UNREACHABLE
    assert f"Cannot listen on 127.0.0.1:{port}" in done.stderr
    assert f"taken by pid {os.getpid()} (" in done.stderr
    assert "name another port" in done.stderr


def test_a_free_port_has_no_listener() -> None:
    """No process is listed for a free port."""
    assert describe_listeners(free_port()) == ""


# Packages ------------------------------------------------------------------------------------------------------------

_WITHOUT = """
import sys
sys.modules[{package!r}] = None
sys.modules["botocore"] = None
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
try:
    open_client(ObjectTarget("s3://bucket/x"))
except ConfigInvalid as exc:
    print(exc.message, exc.hint)
"""


@pytest.mark.parametrize(("missing", "named"), [("s3fs", "s3fs"), ("fsspec", "s3fs"), ("fsspec.config", "s3fs")])
def test_without_the_buckets_package_the_error_has_the_pip_line(missing: str, named: str) -> None:
    """The error has the `pip install` command of the Python that lacks the package."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(package=missing)], cwd=HOME, capture_output=True, text=True, check=True
    )
    assert f"{sys.executable} -m pip install {named}" in done.stdout
    assert "on every node" in done.stdout


def test_each_kind_of_bucket_has_its_own_package() -> None:
    """A Google bucket needs gcsfs, not s3fs."""
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigInvalid, match="needs the package gcsfs") as raised:
        open_client(ObjectTarget("gs://bucket/x"))
    assert "pip install gcsfs" in raised.value.hint


# Disks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind", "step"),
    [
        (errno.EACCES, StoreDenied, f"Let user {os.geteuid()} read and write /nvme"),
        (errno.EROFS, StoreDenied, "read-only"),
        (errno.EIO, StoreError, "dmesg"),
        (errno.EMFILE, StoreError, "ulimit -n"),
        (errno.EFBIG, StoreError, "ulimit -f"),
        (errno.EXDEV, StoreError, "volume"),
        (errno.ENOSPC, StoreFull, "Free space"),
        (errno.EDQUOT, StoreFull, "quota -s"),
        (errno.EPERM, StoreDenied, "without modes, such as FAT"),
        (errno.ENOLCK, StoreError, "with locks"),
        (errno.EINVAL, StoreError, "file system does not support this"),
    ],
)
def test_each_disk_error_has_its_own_hint(number: int, kind: type[StoreError], step: str) -> None:
    """Each errno of a disk has a hint of its own: a full disk and a broken one need different steps."""
    error = store_error_of(OSError(number, os.strerror(number)), "/nvme", "write", "x")
    assert type(error) is kind
    assert step in error.hint


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("REPLICATED_CKPT_AGENT_NICE", "x", "must be a whole number, not 'x'"),
        ("REPLICATED_CKPT_AGENT_NICE", "20", "must be 0 to 19, not 20"),
        ("REPLICATED_CKPT_AGENT_DRAIN_S", "x", "must be a number, not 'x'"),
        ("REPLICATED_CKPT_AGENT_COPY_MIB_PER_S", "-1", "must be positive, not -1"),
        ("REPLICATED_CKPT_TLS_CERT", "x", "must be set together"),
    ],
)
def test_a_variable_that_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    """A user who set a variable, and no option, gets an error with the name of the variable."""
    monkeypatch.setenv(variable, value)
    done = command("agent", tmp_path / "node")
    assert done.returncode == ExitCode.USAGE
    assert variable in done.stderr
    assert message in done.stderr


# Nodes ---------------------------------------------------------------------------------------------------------------


def test_a_corrupt_shard_names_the_node_to_bring_back(tmp_path: Path) -> None:
    """All peers are down: `repair` fails, and names the node and host with the other copy."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (1, 0)})
    away = AgentAddress(nodes[1].node_id(), "127.0.0.1", free_port(), "t", origin="REPLICATED_CKPT_HOST on host1")
    PeerBook(nodes[0].agent_directory()).learn([away])
    flip(nodes[0].root / "step-1" / shard(0), 1000)
    done = command("repair", nodes[0].root)
    stop_agent(nodes[0].root)
    assert done.returncode == ExitCode.FAILED
    assert f"bring back node {nodes[1].node_id()} (host1)" in done.stdout.replace("Bring", "bring")
