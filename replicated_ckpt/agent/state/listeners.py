"""The processes that listen on a port of this host, as far as this user may see them. Read by netlink, or from /proc."""

import errno
import pwd
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from replicated_ckpt.environment import PORT_ENV
from replicated_ckpt.errors import AgentUnavailable
from replicated_ckpt.stores.files.existence import is_there

_SOCK_DIAG = 4
_DUMP_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_REQUEST_AND_DUMP, _INTERRUPTED = 0x301, 0x10
_LISTEN = 1 << 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_ANSWER = struct.Struct("=4x2s46x12xII")
_RECEIVE_BYTES = 1 << 18
_TIMEOUT_S = 1.0


class ListeningSocket(NamedTuple):
    """One TCP socket: its port, the user who owns it, and the inode under which processes have it open."""

    port: int
    uid: int
    inode: int


def listening_sockets() -> list[ListeningSocket]:
    """All listening TCP sockets of this network namespace, of every user, IPv4 and IPv6.

    Raises:
        OSError: the kernel, or the container, does not list its sockets.
    """
    return [found for family in (socket.AF_INET, socket.AF_INET6) for found in _dump(family)]


def _dump(family: int) -> Iterator[ListeningSocket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as connection:
        connection.settimeout(_TIMEOUT_S)  # some containers drop the request without an answer
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _LISTEN)
        size = _HEADER.size + len(request)
        connection.sendto(_HEADER.pack(size, _DUMP_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + request, (0, 0))
        while True:
            raw, sender = connection.recvfrom(_RECEIVE_BYTES)
            if sender[0] != 0:
                continue  # another process sent it, not the kernel
            while raw:
                size, kind, flags, _, _ = _HEADER.unpack_from(raw)
                if kind == _DONE:
                    return
                # A dump that was interrupted may lack sockets: the caller reads /proc instead.
                if kind == _ERROR or flags & _INTERRUPTED or size < _HEADER.size + _ANSWER.size:
                    raise OSError(errno.EOPNOTSUPP, "the kernel does not list its listening sockets")
                port, uid, inode = _ANSWER.unpack_from(raw, _HEADER.size)
                yield ListeningSocket(int.from_bytes(port, "big"), uid, inode)
                raw = raw[-(-size // 4) * 4 :]  # messages are aligned to 4 bytes: netlink(7)


_COMMAND_CHARS = 200
_WHO = "As root, `ss -ltnp 'sport = :{}'` names its process."


def listeners_on(port: int) -> frozenset[ListeningSocket]:
    """All sockets that listen on a port, of every user; empty if neither netlink nor /proc lists them."""
    try:
        found = listening_sockets()
    except OSError:  # for example, gVisor and some containers lack this netlink family
        found = _read_tables()
    return frozenset(each for each in found if each.port == port)


def _read_tables() -> list[ListeningSocket]:
    """The listening sockets from /proc. Source: proc(5), /proc/net/tcp."""
    tables = [path.read_text() for name in ("tcp", "tcp6") if is_there(path := Path("/proc/net", name))]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A"]  # TCP_LISTEN
    return [ListeningSocket(int(row[1].rpartition(":")[2], 16), int(row[7]), int(row[9])) for row in listening]


def describe_listeners(port: int) -> str:
    """The processes that listen on a port: pid and command if visible, else the user; "" if the port is free."""
    listeners = listeners_on(port)
    seen = [f"pid {pid} ({_command(pid)})" for pid in _holders({listener.inode for listener in listeners})]
    if seen:
        return ", ".join(seen)
    users = sorted({_user(listener.uid) for listener in listeners})
    return f"a process of {' and '.join(users)}, which this user may not inspect" if users else ""


def _holders(inodes: Collection[int]) -> Iterator[int]:
    """Processes that have one of these sockets open. Only root sees those of other users."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in sorted(
        (path for path in Path("/proc").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    ):
        if wanted.intersection(_open_files(process)):
            yield int(process.name)


def _open_files(process: Path) -> Iterator[str]:
    """The open files of a process, from /proc; none if it belongs to another user, or has ended."""
    with suppress(OSError):
        for entry in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield str(entry.readlink())


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "it has just ended"
    return "".join(char if char.isprintable() else "?" for char in raw[:_COMMAND_CHARS])


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def cannot_listen(host: str, port: int, problem: OSError) -> AgentUnavailable:
    """The error if the agent cannot listen. It names the owner of the port, or what is wrong with the host."""
    why = f"Cannot listen on {host}:{port}: {problem.strerror or problem}"
    if problem.errno == errno.EADDRINUSE:
        holder = describe_listeners(port) or "a process that is not visible from here (another container?)"
        hint = (
            f"End that process, or name another port or a range, with --port or {PORT_ENV}. Without either, the agent "
            f"takes a free port. {_WHO.format(port)}"
        )
        return AgentUnavailable(f"{why}. The port is taken by {holder}.", hint)
    if problem.errno in (errno.EACCES, errno.EPERM):
        return AgentUnavailable(f"{why}.", "Pass a --port from 1024 on: lower ports need root.")
    return AgentUnavailable(
        f"{why}.", "Pass an address of this host with --host (`ip address` lists them), or 0.0.0.0."
    )
