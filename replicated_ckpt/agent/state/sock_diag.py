"""The sockets of this host that listen, asked of the kernel by netlink. Source: sock_diag(7), Linux's inet_diag.h.

`/proc/net/tcp` tells the same, and takes tens of milliseconds whatever it has to tell: the kernel goes through its table of
all connections for it. Here it goes through that of listening sockets alone.
"""

import errno
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_SOCK_DIAG = 4
_DUMP_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_REQUEST_AND_DUMP, _INTERRUPTED = 0x301, 0x10
_LISTEN = 1 << 10
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI48x")
_ANSWER = struct.Struct("=4x2s46x12xII")
_RECEIVE_BYTES = 1 << 18
_TIMEOUT_S = 1.0


class ListeningSocket(NamedTuple):
    """One TCP socket: its port, the user whose it is, and the inode by which processes have it open."""

    port: int
    uid: int
    inode: int


def listening_sockets() -> list[ListeningSocket]:
    """All of this network namespace, of every user, by IPv4 and IPv6.

    Raises:
        OSError: the kernel, or the container, does not answer such questions.
    """
    return [found for family in (socket.AF_INET, socket.AF_INET6) for found in _dump(family)]


def _dump(family: int) -> Iterator[ListeningSocket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as connection:
        connection.settimeout(_TIMEOUT_S)
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, _LISTEN)
        size = _HEADER.size + len(question)
        connection.sendto(_HEADER.pack(size, _DUMP_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + question, (0, 0))
        while True:
            raw, sender = connection.recvfrom(_RECEIVE_BYTES)
            if sender[0] != 0:
                continue  # it is not the kernel's
            while raw:
                size, kind, flags, _, _ = _HEADER.unpack_from(raw)
                if kind == _DONE:
                    return
                if kind == _ERROR or flags & _INTERRUPTED or size < _HEADER.size + _ANSWER.size:
                    raise OSError(errno.EOPNOTSUPP, "the kernel does not list its listening sockets")
                port, uid, inode = _ANSWER.unpack_from(raw, _HEADER.size)
                yield ListeningSocket(int.from_bytes(port, "big"), uid, inode)
                raw = raw[-(-size // 4) * 4 :]
