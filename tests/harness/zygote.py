"""The harness's side of the two zygotes, one with torch for ranks and one without. Each is started once a session, when
first needed.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.becoming import ROOM_BYTES

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0  # for importing torch on a busy machine
STOP_TIMEOUT_S = 10.0


class Rank:
    """A forked rank, with the methods of `subprocess.Popen` that the harness uses."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._zygote.listen(0.0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._zygote.listen(START_TIMEOUT_S)
        return self.returncode


class Zygote:
    """A process that forks ranks. Only one thread may use it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process runs
        self._rank_by_pid: dict[int, Rank] = {}
        self._started: list[Rank] = []
        command = [sys.executable, "-m", "tests.harness.forking", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd="/",
                env=_own_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        *,
        mounts: Sequence[Sequence[str]] = (),
        hostname: str | None = None,
        netns: str | None = None,
    ) -> Rank:
        """Starts a rank of the launch in `folder`. `mounts`: pairs (disk, root) that only the rank and its children
        see.
        """
        request: dict[str, Any] = {"environment": dict(environment), "folder": str(folder), "log": str(log)}
        request["agents"] = str(the_light_zygote().path)
        request |= {"mounts": list(mounts), "hostname": hostname, "netns": netns}
        self._socket.send(json.dumps(request).encode())
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._started:
            assert time.monotonic() < deadline, f"no rank was forked within {START_TIMEOUT_S:.0f} s"
            self.listen(1.0)
        return self._started.pop()

    def listen(self, timeout_s: float) -> None:
        """Reads the zygote's reports. Waits up to `timeout_s` for the first one."""
        self._socket.settimeout(timeout_s)
        try:
            while report := self._socket.recv(1 << 10):
                self._take(json.loads(report))
                self._socket.settimeout(0.0)
        except (TimeoutError, BlockingIOError):
            return
        self._errors.seek(0)
        raise AssertionError(f"the zygote has ended: {self._errors.read()[-4000:].decode(errors='replace')}")

    def _take(self, report: Mapping[str, int]) -> None:
        if "started" in report:
            rank = self._rank_by_pid[report["started"]] = Rank(self, report["started"])
            self._started.append(rank)
        else:
            self._rank_by_pid.pop(report["ended"]).returncode = report["code"]

    def stop(self) -> None:
        """Ends the zygote and its remaining ranks."""
        self._socket.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()


class LightZygote:
    """A process without torch that forks agents and commands for clients that connect to `path`. They outlive it."""

    def __init__(self) -> None:
        self._lifeline, theirs = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory(prefix="rckpt-")
        self.path = Path(self._folder.name) / "socket"
        arguments = [str(theirs.fileno()), str(self.path), "." * ROOM_BYTES]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.forking_light", *arguments],
                cwd="/",
                env=_own_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.path.exists():
            assert self.is_running, "what forks agents and commands did not start; its output says why"
            assert time.monotonic() < deadline, (
                f"what forks agents and commands did not start within {START_TIMEOUT_S:.0f} s"
            )
            time.sleep(0.01)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._lifeline.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()


def _own_environment() -> dict[str, str]:
    """An environment like the ranks' own, as far as imports depend on it. It names no test and no store."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REPLICATED_CKPT_", "PYTEST_"))}
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    return {
        **{name: value for name, value in kept.items() if name not in {"RANK", "WORLD_SIZE"}},
        "PYTHONPATH": ":".join([*paths, str(REPOSITORY)]),
        "OMP_NUM_THREADS": "1",
        "ROOM": "." * ROOM_BYTES,
    }


_running: list[Zygote] = []
_running_light: list[LightZygote] = []
_lock = threading.Lock()


def the_zygote() -> Zygote:
    """The session's zygote of ranks, which is started if there is none."""
    if not _running or not _running[0].is_running:
        _running[:] = [Zygote()]
    return _running[0]


def the_light_zygote() -> LightZygote:
    """The session's zygote of agents and commands, which is started if there is none. Any thread may call this."""
    with _lock:
        if not _running_light or not _running_light[0].is_running:
            _running_light[:] = [LightZygote()]
        return _running_light[0]


def stop_the_zygotes() -> None:
    """Called at the end of a session. Otherwise the zygotes end with the process that started them."""
    for running in (_running, _running_light):
        while running:
            running.pop().stop()
