"""Attacks that a code review found. Each one succeeded then, and is refused now."""

import io
import os
import socket
import time
from email.message import Message
from pathlib import Path

import pytest

from replicated_ckpt.agent.state.endpoint import Endpoint, listening_endpoint, write_endpoint
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.errors import ManifestInvalid
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore

SAVE = "b" * 32
NOBODY = 65534


def receive_file(service: NodeService, name: str, raw: bytes) -> None:
    headers = Message()
    headers["Content-Length"] = str(len(raw))
    service.receive(SAVE, name, Body(io.BytesIO(raw), headers), durable=True)


def test_a_manifest_names_the_checkpoint_that_its_save_was_opened_for(tmp_path: Path) -> None:
    """A client that may write the files of one checkpoint cannot publish or replace another checkpoint with them."""
    service = NodeService(LocalStore(tmp_path / "root"))
    service.open_save(Intent(SAVE, "run/step-7", "session", overwrite=True, nodes=(service.node_id,)))
    node = NodeEntry(service.node_id, "host", None, (0,))
    manifest = Manifest(SAVE, "run/step-8", 9, 0.0, 1, 1, 4, crc32c(b"evil"), (node,), {})
    receive_file(service, METADATA_NAME, b"evil")
    with pytest.raises(ManifestInvalid, match="names another"):
        receive_file(service, MANIFEST_NAME, manifest.encode())
    assert not service.store.final("run/step-8").exists()


def listener_of(uid: int) -> tuple[int, int]:
    """Starts a process of this user that listens on a port. Returns the port and the pid, which the caller kills."""
    taken = socket.create_server(("127.0.0.1", 0))
    port, pid = taken.getsockname()[1], 0
    taken.close()
    pid = os.fork()
    if pid == 0:
        os.setuid(uid)
        stranger = socket.create_server(("127.0.0.1", port))
        time.sleep(60)
        stranger.close()
        os._exit(0)
    return port, pid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes processes of other users")
def test_another_user_on_a_dead_agents_port_gets_no_token(tmp_path: Path) -> None:
    """The endpoint file of a killed agent is still there, and another user listens on its port: the file is not used."""
    directory = LocalStore(tmp_path / "root").agent_directory()
    for uid, is_believed in ((NOBODY, False), (os.geteuid(), True)):
        port, pid = listener_of(uid)
        try:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.01)
            endpoint = Endpoint("n", "127.0.0.1", port, "peer", pid, "1", 1, "", "owner")
            write_endpoint(directory, endpoint)
            assert (listening_endpoint(directory) == endpoint) is is_believed
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    assert listening_endpoint(directory) is None, "the listener has ended"
