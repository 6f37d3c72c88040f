"""Which processes listen on a port of this host, as far as this user may see it."""

import errno
import pwd
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from replicated_ckpt.agent.state.sock_diag import ListeningSocket, listening_sockets
from replicated_ckpt.environment import PORT_ENV
from replicated_ckpt.errors import AgentUnavailable
from replicated_ckpt.stores.files.existence import is_there

_COMMAND_CHARS = 200
_WHO = "As root, `ss -ltnp 'sport = :{}'` names its process."


def listeners_on(port: int) -> frozenset[ListeningSocket]:
    """All sockets that listen on a port, of every user; empty where neither netlink nor /proc tells."""
    try:
        found = listening_sockets()
    except OSError:  # gVisor, say, and some containers have no such netlink
        found = _read_tables()
    return frozenset(each for each in found if each.port == port)


def _read_tables() -> list[ListeningSocket]:
    """Source: proc(5), /proc/net/tcp."""
    tables = [path.read_text() for name in ("tcp", "tcp6") if is_there(path := Path("/proc/net", name))]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A"]
    return [ListeningSocket(int(row[1].rpartition(":")[2], 16), int(row[7]), int(row[9])) for row in listening]


def describe_listeners(port: int) -> str:
    """In words, whose the port is: pid and command where they can be seen, else the user; empty if it is free."""
    listeners = listeners_on(port)
    seen = [f"pid {pid} ({_command(pid)})" for pid in _holders({listener.inode for listener in listeners})]
    if seen:
        return ", ".join(seen)
    users = sorted({_user(listener.uid) for listener in listeners})
    return f"a process of {' and '.join(users)}, which this user may not see" if users else ""


def _holders(inodes: Collection[int]) -> Iterator[int]:
    """Processes that have one of these sockets open; those of other users are seen by root alone."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in sorted(
        (path for path in Path("/proc").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    ):
        if wanted.intersection(_open_files(process)):
            yield int(process.name)


def _open_files(process: Path) -> Iterator[str]:
    """What a process has open, by the links in /proc; nothing of another user's, or of one that has ended."""
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
    """Why the agent cannot listen, and what to do about it: whose the port is, or what is wrong with the host."""
    why = f"Cannot listen on {host}:{port}: {problem.strerror or problem}"
    if problem.errno == errno.EADDRINUSE:
        holder = describe_listeners(port) or "a process that cannot be seen from here (another container?)"
        hint = (
            f"End that process, or pass another --port, or a range of them, there or in {PORT_ENV}; "
            f"without both the agent takes a free one. {_WHO.format(port)}"
        )
        return AgentUnavailable(f"{why}. The port is taken by {holder}.", hint)
    if problem.errno in (errno.EACCES, errno.EPERM):
        return AgentUnavailable(f"{why}.", "Pass a --port from 1024 on: lower ones are for root.")
    return AgentUnavailable(
        f"{why}.", "Pass an address of this host with --host (`ip address` lists them), or 0.0.0.0."
    )
