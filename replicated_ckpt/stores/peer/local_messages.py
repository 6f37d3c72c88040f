"""Messages between a rank and its node's agent over the Unix socket in ROOT/.agent: JSON with file descriptors.

Only the agent's own user can reach the socket: the directory is private, and each side checks the user of the other.
"""

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicated_ckpt.errors import PeerProtocolError, StoreDenied
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.stores.peer.answer import document_in

SOCKET_NAME = "agent.sock"
MESSAGE_BYTES_MAX = 64 << 20
"""Enough for the layout of a shard of a million items."""
DESCRIPTORS_MAX = 2
_HEAD = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("iII")
_ANOTHER = "Run ranks and agent as the same user. Or save with dcp.save, which submits nothing to the agent."


def listen(directory: Path) -> socket.socket:
    """The agent's end. Replaces the socket of an agent that died: the caller holds the lock of the root.

    Raises:
        OSError: for example, the file system supports no sockets.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        (directory / SOCKET_NAME).unlink(missing_ok=True)
        with _short_path(directory) as path:
            listener.bind(path)
        listener.listen(256)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(directory: Path, timeout_s: float) -> socket.socket:
    """The rank's end. Raises OSError: no agent listens there. StoreDenied: another user's process does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short_path(directory) as path:
            connection.connect(path)
        check_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_same_user(connection: socket.socket) -> None:
    """Raises StoreDenied: the process at the other end is neither this user's nor root's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    # Another user's process could put its own socket here while no agent runs.
    if user not in (os.geteuid(), 0):
        raise StoreDenied("this node", "connect", SOCKET_NAME, f"user {user} is at the other end", _ANOTHER)


def send_message(connection: socket.socket, fields: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message. Raises OSError: the other end has closed, or takes nothing in time."""
    raw = json.dumps(fields).encode()
    head = _HEAD.pack(len(raw))
    if descriptors:
        # With the head: descriptors must accompany some bytes, and so few bytes are never split.
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(raw)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message, and its descriptors, which the caller closes.

    Raises:
        EOFError: the other end has closed. OSError: it sends nothing in time. PeerProtocolError: that is not a message.
    """
    head, descriptors = _receive_head(connection)
    try:
        return _receive_rest(connection, head), descriptors
    except BaseException:
        # The descriptors are open in this process by now, whatever was wrong with the message.
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _receive_rest(connection: socket.socket, head: bytes) -> dict[str, Any]:
    while len(head) < _HEAD.size:
        head += _receive(connection, _HEAD.size - len(head))
    (size,) = _HEAD.unpack(head)
    # Before memory is allocated: the size is the sender's claim.
    if size > MESSAGE_BYTES_MAX:
        raise PeerProtocolError(f"A message of {size} bytes came through {SOCKET_NAME}: more than {MESSAGE_BYTES_MAX}.")
    raw = bytearray()
    while len(raw) < size:
        raw += _receive(connection, size - len(raw))
    return document_in(bytes(raw), f"the other end of {SOCKET_NAME} sent a message")


def _receive_head(connection: socket.socket) -> tuple[bytes, list[int]]:
    received = array.array("i")
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * received.itemsize)
    # CLOEXEC from the start: a child that another thread forks would keep the rank's memory in use.
    head, ancillary, _, _ = connection.recvmsg(_HEAD.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # The kernel may cut the list in the middle of a descriptor (recvmsg in Python's documentation).
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    if not head:
        raise EOFError(f"the other end of {SOCKET_NAME} is closed")
    return head, list(received)


def _receive(connection: socket.socket, size: int) -> bytes:
    piece = connection.recv(min(size, 1 << 20))
    if not piece:
        raise EOFError(f"the other end of {SOCKET_NAME} was closed in the middle of a message")
    return piece


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """A path to the socket through a descriptor of its directory: a socket's path is limited to 107 bytes."""
    with closing_fd(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
