"""Forks agents and commands from a process that has already imported them, as imports are most of a short command's
time.

Each is still a process of its own, with the given arguments, environment, output and namespaces.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from replicated_ckpt.agent.launch import agent_environment, isolated_python, spawn_agent
from tests.harness import namespaces
from tests.harness.processes import signal_if_running

Program = Literal["agent", "command"]  # python -m replicated_ckpt.agent, or replicated-ckpt
Spawn = Callable[[Sequence[str], int], "subprocess.Popen[bytes]"]
START_TIMEOUT_S = 60.0  # for the imports, on a busy machine
_ANSWER_BYTES = 1 << 10


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the package and the tests use."""

    def __init__(
        self,
        forker: Path,
        program: Program,
        arguments: Sequence[str],
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        errors: int | None = None,
        cwd: str = "/",
        user: int | None = None,
        mounts: Sequence[Sequence[str]] = (),
        hostname: str | None = None,
        netns: str | None = None,
    ) -> None:
        """`command`: the equivalent command line, which /proc shows. `errors`: by default the same as `output`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.args = [*command, *arguments]
        self.returncode: int | None = None
        request = {
            "program": program,
            "arguments": list(arguments),
            "shown": self.args,
            "environment": dict(environment),
            "cwd": cwd,
            "user": user,
            "umask": _umask(),
            "mounts": list(mounts),
            "hostname": hostname,
            "netns": netns,
        }
        self._socket.settimeout(START_TIMEOUT_S)
        self._socket.connect(str(forker))
        own = namespaces.open_own()
        given = [output, output if errors is None else errors, *own]
        socket.send_fds(self._socket, [json.dumps(request).encode()], given)
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
        assert answer, "what forks agents and commands has ended"
        received: dict[str, int] = json.loads(answer)
        return received

    def __del__(self) -> None:
        self._socket.close()


def _umask() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


def run_command(
    forker: Path, arguments: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, user: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs `replicated-ckpt` with these arguments to its end. Returns its exit code and output."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command, fds = ["replicated-ckpt"], (output.fileno(), errors.fileno())
        running = Forked(
            forker,
            "command",
            arguments,
            command=command,
            environment=environment,
            output=fds[0],
            errors=fds[1],
            user=user,
        )
        try:
            code = running.wait(timeout_s)
        finally:
            running.kill()
        texts = [os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in fds]
    return subprocess.CompletedProcess(running.args, code, *texts)


def spawner(find: Callable[[], Path]) -> Spawn:
    """Replaces the package's `spawn_agent`: forks the same agent. A process of another user starts it as usual.

    `find` returns the socket of the process that forks agents.
    """

    def spawn(arguments: Sequence[str], log: int) -> "subprocess.Popen[bytes] | Forked":
        forker = find()
        if not os.access(forker, os.W_OK, effective_ids=True):
            return spawn_agent(arguments, log)
        command, environment = isolated_python(), agent_environment()
        return Forked(forker, "agent", arguments, command=command, environment=environment, output=log)

    return cast("Spawn", spawn)
