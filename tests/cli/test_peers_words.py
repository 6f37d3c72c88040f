"""Answers of a lying peer cannot control the terminal, and rename no other node."""

import socketserver
import threading
from dataclasses import replace

import pytest

from replicated_ckpt.cli.checkpoints.repair import list_failures
from replicated_ckpt.cli.look.nodes import NO_NODES, NodesSeen, advise_on_unknown_nodes, on_each_host
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.errors import PeerProtocolError, StoreUnavailable
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

FORGED = "\x1b[2Jwell\nmay be taken down"
AT = AgentAddress("b", "127.0.0.1", 1, "token")


class _Liar(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(b"\x1b[2J\x1b]0;title\x07 no status line\r\n\r\n")


def test_an_invalid_status_line_is_escaped() -> None:
    """The invalid status line is in the error, with its control characters escaped."""
    with socketserver.TCPServer(("127.0.0.1", 0), _Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = replace(AT, port=server.server_address[1])
        try:
            with AgentClient(at) as client, pytest.raises(StoreUnavailable) as caught:
                client.call("GET", "/v1/status")
        finally:
            server.shutdown()
    assert "BadStatusLine" in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()


def test_each_result_of_a_repair_is_one_line() -> None:
    """Actions and errors of a peer become one line each. An invalid answer raises PeerProtocolError."""
    assert list_failures({"results": [{"action": FORGED, "error": FORGED}]}, "node b") == {
        r"\x1b[2Jwell\nmay be taken down": r"\x1b[2Jwell\nmay be taken down"
    }
    with pytest.raises(PeerProtocolError, match="node b sent an invalid answer to repair"):
        list_failures({"results": [{"error": "x"}]}, "node b")


def test_a_manifest_does_not_rename_a_node_that_is_known() -> None:
    """A host name in the address book takes precedence over the manifest. An IP address does not."""
    nodes = tuple(
        NodeEntry(node, host, None, (0,)) for node, host in (("b", "node-c"), ("c", "node-c2"), ("d", FORGED))
    )
    manifest = Manifest("0" * 32, "x", 1, 0.0, 1, 1, 0, 0, nodes, {})
    addresses = {"b": replace(AT, host="node-b"), "c": replace(AT, node_id="c", host="10.0.0.3")}
    seen = NodesSeen("a", {}, addresses, {}, {manifest.save_id: manifest})
    assert (seen.name("b"), seen.name("c")) == ("node-b", "node-c2")
    assert seen.name("d").isprintable()


def test_a_line_for_all_hosts_leaves_out_hosts_that_are_down() -> None:
    """A host where only the agent ended stays: the command starts it. If no other host is left, the line names all."""
    ended, silent = StoreUnavailable("c", "GET", "/"), StoreUnavailable("d", "GET", "/")
    ended.__cause__, silent.__cause__ = ConnectionRefusedError(), TimeoutError()
    addresses = {node: AgentAddress(node, f"host-{node}", 1, "token") for node in "bcd"}
    seen = NodesSeen("a", {}, addresses, {"c": ended, "d": silent}, {})
    assert on_each_host(seen, "bcd", "x") == "`for host in host-b host-c; do ssh $host x; done`"
    assert on_each_host(seen, "d", "x") == "`ssh host-d x`"


def test_a_node_that_was_not_asked_is_named_in_one_sentence() -> None:
    """`ls --nodes` asks only the given agents. The verb agrees with the number of other nodes."""
    for unknown, expected in (
        (["b"], "b was not asked: name its agent"),
        (["b", "c"], "b, c were not asked: name their agents"),
    ):
        assert advise_on_unknown_nodes(unknown, NO_NODES) == [f"next step: {expected} with --nodes, too"]
