"""Which processes listen on a port of this host, as far as this user may see it. Source: proc(5), /proc/net/tcp."""

import pwd
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_COMMAND_CHARS = 200


@dataclass(frozen=True)
class Listener:
    """One socket that listens: the user whose it is, and the inode by which its processes have it open."""

    uid: int
    inode: int


def listeners_on(port: int) -> frozenset[Listener]:
    """All sockets that listen on a port, of every user; empty where /proc does not tell."""
    tables = [path.read_text() for name in ("tcp", "tcp6") if (path := Path("/proc/net", name)).exists()]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return frozenset(
        Listener(int(row[7]), int(row[9]))
        for row in rows
        if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    )


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
