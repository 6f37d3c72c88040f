"""Finds the processes that listen on a port, by netlink and by /proc."""

import contextlib
import os
import socket

import pytest

from replicated_ckpt.agent.state import listeners
from replicated_ckpt.agent.state.listeners import listeners_on, listening_sockets

PLACES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]


def listen(family: socket.AddressFamily, host: str, port: int = 0) -> socket.socket:
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.listen()
    return sock


def refuse() -> list[object]:
    raise OSError("no netlink here")


@pytest.mark.parametrize(("family", "host"), PLACES)
@pytest.mark.parametrize("by_netlink", [True, False], ids=["netlink", "proc"])
def test_sockets_that_listen_are_found(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, host: str, by_netlink: bool
) -> None:
    """Each listening socket has its user and inode, also two on one port. Connections and closed sockets are not
    listed.
    """
    if by_netlink:
        assert listening_sockets(), "netlink lists no sockets on this kernel"
    else:
        monkeypatch.setattr(listeners, "listening_sockets", refuse)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(listen(family, host))
        port = first.getsockname()[1]
        second = stack.enter_context(listen(family, host, port))
        stack.enter_context(socket.create_connection(("127.0.0.1" if family == socket.AF_INET else "::1", port)))
        inodes = {os.fstat(sock.fileno()).st_ino for sock in (first, second)}
        found = listeners_on(port)
        assert {(each.uid, each.inode) for each in found} == {(os.getuid(), inode) for inode in inodes}
    assert not listeners_on(port)
