"""Agents that are forked from a process that has imported them: a quarter of a second of imports is most of a short one.

Each is a process of its own all the same, with the arguments, environment, output and namespaces that it was asked for.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicated_ckpt.agent.start.environment import agent_environment, isolated_python
from replicated_ckpt.agent.start.launch import spawn_agent
from tests.multiprocess import namespaces
from tests.multiprocess.processes import signal_if_running

START_TIMEOUT_S = 60.0  # for the imports, on a busy machine
_ANSWER_BYTES = 1 << 10


class ForkedAgent:
    """A forked agent, with what the package and the tests use of a `subprocess.Popen`."""

    def __init__(
        self,
        forker: Path,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: int,
        cwd: str = "/",
        mount: Sequence[str] = (),
        netns: str | None = None,
    ) -> None:
        """`command` is what would start it; the agent's own arguments begin at "--root"."""
        self.args = list(command)
        self.returncode: int | None = None
        request = {"command": self.args, "environment": dict(environment), "cwd": cwd, "umask": _umask()}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_TIMEOUT_S)
        self._socket.connect(str(forker))
        message = json.dumps({**request, "mount": list(mount), "netns": netns}).encode()
        own = namespaces.open_own()
        socket.send_fds(self._socket, [message], [output, *own])
        for fd in own:
            os.close(fd)
        self.pid = self._receive()["pid"]

    def poll(self) -> int | None:
        if self.returncode is None:
            self._socket.settimeout(0.0)
            try:
                self._take_code()
            except BlockingIOError:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self._take_code()
            except TimeoutError as exc:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from exc
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal_if_running(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take_code(self) -> None:
        self.returncode = self._receive()["code"]
        self._socket.close()

    def _receive(self) -> dict[str, int]:
        answer = self._socket.recv(_ANSWER_BYTES)
        assert answer, "what forks agents has ended"
        received: dict[str, int] = json.loads(answer)
        return received

    def __del__(self) -> None:
        self._socket.close()


def _umask() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


def spawner(find: Callable[[], Path]) -> Callable[[Sequence[str], int], "subprocess.Popen[bytes] | ForkedAgent"]:
    """Stands in for `spawn_agent` of the package: the same agent, forked. Another user's process starts it as ever.

    `find` says where what forks agents listens.
    """

    def spawn(arguments: Sequence[str], log: int) -> "subprocess.Popen[bytes] | ForkedAgent":
        forker = find()
        if not os.access(forker, os.W_OK, effective_ids=True):
            return spawn_agent(arguments, log)
        return ForkedAgent(forker, [*isolated_python(), *arguments], environment=agent_environment(), output=log)

    return spawn
