"""The zygote: a process that imports torch once, and forks the ranks of every launch. The import is most of a short
test.

It has no threads, no process group, and no connection except its socket to the harness. When that socket is closed, the
zygote and all of its ranks end, however the harness ended.
"""

import encodings.idna
import encodings.latin_1  # noqa: F401
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.serialization.config  # noqa: F401

from replicated_ckpt.agent import launch
from tests.harness import namespaces, worker
from tests.harness.becoming import become_environment
from tests.harness.forked import spawner
from tests.steps import state  # noqa: F401

REQUEST_BYTES_MAX = 1 << 20


def become_rank(request: Mapping[str, Any]) -> int:
    """Runs in the forked child: sets up session, environment, output and namespaces, then runs the rank."""
    os.setsid()
    become_environment(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["folder"])
    if request["mounts"]:
        namespaces.mount_privately(request["mounts"])
    if request["hostname"]:
        namespaces.name_host(request["hostname"])
    if request["netns"]:
        namespaces.enter_network(request["netns"])
    launch.spawn_agent = spawner(lambda: Path(request["agents"]))  # type: ignore[assignment]
    return worker.main(Path(request["folder"]) / "spec.json")


class Zygote:
    """The running ranks, by the descriptor that reports their end."""

    def __init__(self, harness: socket.socket) -> None:
        self._harness = harness
        self._pid_by_fd: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(harness, select.POLLIN)

    def serve(self) -> int:
        """Forks a rank for each request, and reports the end of each. Returns an exit code, separately in every
        process.
        """
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._pid_by_fd:
                    self._report_end(fd)
                elif not (request := self._harness.recv(REQUEST_BYTES_MAX)):
                    return self._ended()
                elif (pid := os.fork()) == 0:
                    self._forget()
                    return become_rank(json.loads(request))
                else:
                    self._watch(pid)

    def _forget(self) -> None:
        """Runs in the child: closes everything that the zygote has open."""
        self._harness.close()
        for fd in self._pid_by_fd:
            os.close(fd)

    def _watch(self, pid: int) -> None:
        fd = os.pidfd_open(pid)
        self._pid_by_fd[fd] = pid
        self._poll.register(fd, select.POLLIN)
        self._send(started=pid)

    def _report_end(self, fd: int) -> None:
        pid = self._pid_by_fd.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._send(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _ended(self) -> int:
        for pid in self._pid_by_fd.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return 0

    def _send(self, **fields: int) -> None:
        try:
            self._harness.send(json.dumps(fields).encode())
        except BrokenPipeError:
            return  # The harness is gone. The next read of the socket fails, too.


def main(fd: int) -> int:
    """Serves the harness at the other end of the socket `fd`."""
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) != 1:
        raise RuntimeError(f"the imports started threads ({threads}); a process that has some must not fork")
    gc.collect()
    gc.freeze()
    return Zygote(socket.socket(fileno=fd)).serve()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
