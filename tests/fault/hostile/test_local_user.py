"""Another user of the host prepares a root before the first agent starts: the agent trusts none of it."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.errors import StoreDenied
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.local_messages import SOCKET_NAME
from tests.agent.agents import HOME, running_agent
from tests.gloo import group_of_one

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user"),
]
NOBODY = 65534
CHOSEN = "00000000000000000000000000000bad"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that every user of the host may write, like /tmp."""
    with tempfile.TemporaryDirectory(prefix="rckpt-") as base:
        Path(base).chmod(0o1777)
        yield Path(base)


def as_nobody(command: str) -> None:
    subprocess.run(["sh", "-c", command], user=NOBODY, group=NOBODY, extra_groups=[], check=True, timeout=20)


def agent_refused(root: Path) -> str:
    """Starts an agent that must refuse its root. Returns its error output."""
    command = [sys.executable, "-m", "replicated_ckpt.agent", "--root", str(root), "--idle-exit-s", "30"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5, done.stderr
    return done.stderr


def test_an_identity_that_another_user_chose_is_not_used(scratch: Path) -> None:
    """The agent ends with an error that names the owner and the mode. The other user's token is never used."""
    as_nobody(f"mkdir -m 777 {scratch}/root {scratch}/root/.agent")
    identity = json.dumps({"token": CHOSEN, "port": 0, "incarnation": 5})
    as_nobody(f"echo '{identity}' > {scratch}/root/.agent/identity.json; chmod 666 {scratch}/root/.agent/identity.json")
    said = agent_refused(scratch / "root")
    assert "it should belong to user root" in said
    assert "nobody" in said
    assert "0777" in said
    assert not (scratch / "root/.agent/endpoint.json").exists()


def test_an_agents_directory_that_is_a_link_is_not_followed(scratch: Path) -> None:
    """This holds in another user's root, and in the user's own root if all can write it."""
    as_nobody(f"mkdir -m 777 {scratch}/root {scratch}/theirs && ln -s {scratch}/theirs {scratch}/root/.agent")
    agent_refused(scratch / "root")
    (scratch / "own").mkdir()
    (scratch / "own").chmod(0o1777)
    as_nobody(f"ln -s {scratch}/theirs {scratch}/own/.agent")
    agent_refused(scratch / "own")
    (scratch / "own").chmod(0o755)
    assert "it is not a directory" in agent_refused(scratch / "own")
    assert list((scratch / "theirs").iterdir()) == []


@pytest.mark.parametrize("kind", ["-s", ""])
def test_no_log_is_appended_to_a_file_that_another_user_chose(scratch: Path, kind: str) -> None:
    """A rank that starts an agent opens the log only in a directory where no other user can have placed a link, soft or
    hard.
    """
    (scratch / "precious").write_text("precious")
    os.chown(scratch / "precious", NOBODY if not kind else 0, -1)
    as_nobody(f"mkdir -m 777 {scratch}/root {scratch}/root/.agent")
    as_nobody(f"ln {kind} {scratch}/precious {scratch}/root/.agent/log")
    with pytest.raises(StoreDenied, match="nobody"):
        ensure_agent(LocalStore(scratch / "root"), "127.0.0.1")
    os.chown(scratch / "root", 0, 0)
    os.chown(scratch / "root/.agent", 0, 0)
    (scratch / "root").chmod(0o755)
    with pytest.raises(StoreDenied, match="can write it"):
        ensure_agent(LocalStore(scratch / "root"), "127.0.0.1")
    (scratch / "root/.agent").chmod(0o700)
    with pytest.raises(StoreDenied, match="log"):
        ensure_agent(LocalStore(scratch / "root"), "127.0.0.1")
    assert (scratch / "precious").read_text() == "precious"


def test_a_root_in_a_shared_directory_is_private(scratch: Path) -> None:
    """In a directory like /tmp the root is created private: another user can read, rename and replace nothing in it."""
    store = LocalStore(scratch / "root")
    store.agent_directory()
    for command in ("ls {0}", "mv {0} {0}-2", "mkdir {0}/x", "rm -rf {0}/.agent"):
        with pytest.raises(subprocess.CalledProcessError):
            as_nobody(command.format(store.root))
    assert store.agent_directory().exists()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_load_from_another_users_root_is_refused_by_name(scratch: Path, mode: int) -> None:
    """The load raises StoreDenied with the file and the user who needs access, not PermissionError and not
    CheckpointNotFound.
    """
    root = scratch / "root"
    dcp.save(
        {"a": torch.ones(3)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root, copies=1), no_dist=True
    )
    root.chmod(mode)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(StoreDenied, match=f"Let user {NOBODY} read and write {root}/") as caught:
            dcp.load({"a": torch.zeros(3)}, checkpoint_id="latest", storage_reader=ReplicatedReader(root), no_dist=True)
    finally:
        os.seteuid(0)
        os.setegid(0)
    assert caught.value.store == str(root)


def test_a_rank_of_root_does_not_submit_to_another_users_agent(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rank does not give its memory to another user's agent: the asynchronous save succeeds, and the log says why
    the rank wrote by itself.
    """
    root = scratch / "root"
    with running_agent(root, "--idle-exit-s", "60"), socket.socket(socket.AF_UNIX) as theirs:
        unix_socket = root / ".agent" / SOCKET_NAME
        unix_socket.unlink()
        theirs.bind(str(unix_socket))
        os.seteuid(NOBODY)
        theirs.listen()
        os.seteuid(0)
        with group_of_one():
            state = {"values": torch.arange(1 << 16)}
            future = dcp.async_save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root, copies=1))
            assert isinstance(future, Future)
            future.result(timeout=60)
        assert "this rank writes its shards itself" in caplog.text
        assert f"user {NOBODY} is at the other end" in caplog.text
        found = {"values": torch.zeros(1 << 16, dtype=torch.int64)}
        dcp.load(found, storage_reader=dcp.FileSystemReader(root / "step-1"))
        assert torch.equal(found["values"], state["values"])
