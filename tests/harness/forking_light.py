"""A process that imports the agent and the command line, but not torch, and forks agents and commands.

It listens on a socket in a directory of its own user, has no threads, and ends with the harness. Its agents live on, as
real agents outlive the rank that started them.
"""

import encodings.idna  # noqa: F401 - imported for what is forked, as all others that seem unused
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import cryptography.x509  # noqa: F401
import s3fs  # noqa: F401

from replicated_ckpt.agent import launch
from replicated_ckpt.agent.__main__ import main as run_agent
from replicated_ckpt.cli.main import main as run_command
from replicated_ckpt.cli.main import parser
from tests.harness import namespaces
from tests.harness.becoming import become_environment, show_command
from tests.harness.forked import spawner

_REQUEST_BYTES_MAX = 1 << 20


def become(request: dict[str, Any], output: int, errors: int, network: int, mounts: int) -> int:
    """Runs in the forked child: sets up what a new process would have, in the namespaces of the requester, then runs
    the program.
    """
    os.setsid()
    namespaces.enter(network, mounts)
    if request["mounts"]:
        namespaces.mount_privately(request["mounts"])
    if request["hostname"]:
        namespaces.name_host(request["hostname"])
    if request["netns"]:
        namespaces.enter_network(request["netns"])
    become_environment(request["environment"])
    show_command(request["shown"])
    os.umask(request["umask"])
    for fd, place in ((output, 1), (errors, 2)):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(request["cwd"])
    if request["user"] is not None:
        os.setuid(request["user"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run may ignore it
    sys.argv = [request["program"], *request["arguments"]]
    if request["program"] == "command":
        return run_command()
    faulthandler.register(signal.SIGUSR1, file=2)  # in its log, if it does not end when it is told to
    return run_agent()


class Forker:
    """Forks a process for each connection, and reports the end of the process on it."""

    def __init__(self, lifeline: socket.socket, path: Path) -> None:
        self._lifeline = lifeline
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{path}.new")
        self._listener.listen(64)
        Path(f"{path}.new").rename(path)  # Clients that find the socket get an answer.
        self._asking: dict[int, socket.socket] = {}
        self._started: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that reports its end
        self._poll = select.poll()
        for one in (lifeline, self._listener):
            self._poll.register(one, select.POLLIN)

    def serve(self) -> int:
        """Serves until the harness ends. Returns an exit code, separately in every process."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._lifeline.fileno():
                    self._path.unlink(missing_ok=True)
                    if self._path.parent.is_dir():
                        self._path.parent.rmdir()  # a killed harness does not remove it
                    return 0
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._started:
                    self._report_end(fd)
                elif (code := self._fork_for(fd)) is not None:
                    return code

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._asking[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _fork_for(self, fd: int) -> int | None:
        """In the forked process, returns its exit code. In this one, None."""
        self._poll.unregister(fd)
        connection = self._asking.pop(fd)
        text, given, _, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, 4)
        if not text:  # the process that asked is gone
            connection.close()
            return None
        if (pid := os.fork()) == 0:
            connection.close()
            self._forget()
            return become(json.loads(text), *given)
        for one in given:
            os.close(one)
        watch = os.pidfd_open(pid)
        self._started[watch] = pid, connection
        self._poll.register(watch, select.POLLIN)
        _send(connection, pid=pid)
        return None

    def _forget(self) -> None:
        """Runs in the child: closes everything that this process has open."""
        for one in (self._lifeline, self._listener, *self._asking.values()):
            one.close()
        for fd, (_, connection) in self._started.items():
            os.close(fd)
            connection.close()

    def _report_end(self, fd: int) -> None:
        pid, connection = self._started.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        _send(connection, code=os.waitstatus_to_exitcode(status))
        connection.close()


def _send(connection: socket.socket, **fields: int) -> None:
    try:
        connection.send(json.dumps(fields).encode())
    except (BrokenPipeError, ConnectionResetError):
        return  # The requester is gone. The forked process lives on.


def main(fd: int, path: Path) -> int:
    """Forks requested processes at `path` until the other end of the socket `fd` is closed."""
    parser()  # imports every verb
    launch.spawn_agent = spawner(lambda: path)  # type: ignore[assignment]  # commands start agents, too
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) != 1 or "torch" in sys.modules:
        raise RuntimeError(f"what forks agents and commands has started threads ({threads}), or imported torch")
    gc.collect()
    gc.freeze()
    return Forker(socket.socket(fileno=fd), path).serve()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
