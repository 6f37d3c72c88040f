"""Linux namespaces for one process and its children: other disks behind paths, another host name, another network."""

import ctypes
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

NETWORKS = Path("/run/netns")  # where ip-netns(8) keeps them by name
_OWN = Path("/proc/self/ns")
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_PRIVATE_EVERYWHERE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
_libc = ctypes.CDLL(None, use_errno=True)


def mount_privately(mounts: Iterable[Sequence[str]]) -> None:
    """Mounts the first path of each pair at the second, for this process and its children only. Needs root."""
    _checked("unshare", _libc.unshare(_CLONE_NEWNS))
    _checked("make mounts private", _libc.mount(None, b"/", None, _MS_PRIVATE_EVERYWHERE, None))
    for source, target in mounts:
        _checked("bind mount", _libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None))


def name_host(name: str) -> None:
    """Changes the host name for this process and its children. Needs root."""
    _checked("unshare", _libc.unshare(_CLONE_NEWUTS))
    socket.sethostname(name)


def enter_network(name: str) -> None:
    """Moves this thread, and every thread and process that it starts, into the network namespace `name`. Needs root."""
    fd = os.open(NETWORKS / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked("enter the network", _libc.setns(fd, _CLONE_NEWNET))
    finally:
        os.close(fd)


def open_own() -> tuple[int, int]:
    """Descriptors of this process's network and mount namespaces, for `enter`."""
    network, mounts = (os.open(_OWN / name, os.O_RDONLY | os.O_CLOEXEC) for name in ("net", "mnt"))
    return network, mounts


def enter(network: int, mounts: int) -> None:
    """Moves this process, which must have one thread, into the namespaces of another process, and closes the
    descriptors. Needs root if the namespaces differ.
    """
    for fd, name, kind in ((network, "net", _CLONE_NEWNET), (mounts, "mnt", _CLONE_NEWNS)):
        if os.fstat(fd).st_ino != (_OWN / name).stat().st_ino:
            _checked(f"enter another's {name}", _libc.setns(fd, kind))
        os.close(fd)


def _checked(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
