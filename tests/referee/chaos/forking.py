"""Forks the programs that ckpt-chaos starts from a process that has imported torch, because that import takes longest.

Each fork has its own environment, output and audit hooks. ckpt-chaos' own code arms it.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicated_ckpt.agent import launch
from tests.harness.becoming import become_environment
from tests.harness.forked import spawner
from tests.harness.zygote import the_light_zygote

ROOT = Path(__file__).resolve().parents[3]
CLIENT = "tests.referee.chaos.forked"
_START_TIMEOUT_S = 300.0  # for importing a framework on a busy machine
_REQUEST_BYTES_MAX = 1 << 20
_OF_JEMALLOC = "jemalloc_bg_thd"  # pyarrow's, which transformers imports; jemalloc starts another after a fork
_COMMON = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "replicated_ckpt.dcp.manager")
_IMPORTS = {
    "hf_trainer": ("transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "accelerate"),
    "lightning_trainer": ("lightning.pytorch",),
    "accelerate_loop": ("accelerate",),
}
"""The framework of a target. Our integrations and the program itself are imported after the fork: they read the
environment.
"""


@contextlib.contextmanager
def forker(program: str, framework: str = "") -> Iterator[str]:
    """Yields the path of a socket. `forked.py` connects there to run `main` of module `program` in a fork. Ends with
    the block.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        path = Path(folder) / "socket"
        command = [sys.executable, "-m", "tests.referee.chaos.forking", str(path), program, framework]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["CHAOS_AGENTS"] = str(the_light_zygote().path)
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=ROOT) as process:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise RuntimeError(f"{' '.join(command)} did not start, or ended with {process.returncode}")
                time.sleep(0.05)
            yield str(path)  # Popen's own exit closes the pipe, which ends the process


def become(program: str, request: dict[str, Any], output: int, errors: int) -> None:
    """In the forked child: sets up what a new process would have, then runs the program."""
    agents = Path(os.environ["CHAOS_AGENTS"])
    become_environment(request["environment"])
    for fd, place in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(request["cwd"])
    launch.spawn_agent = spawner(lambda: agents)  # type: ignore[assignment]
    sys.argv = [program, *request["arguments"]]
    boot = importlib.util.find_spec("ckpt_chaos")
    assert boot is not None
    assert boot.origin is not None
    # As `ckpt-chaos run` does in a new interpreter; the targets of `bench` arm themselves.
    if request["environment"].get("CKPT_CHAOS_TORN_PYTHON"):
        runpy.run_path(str(Path(boot.origin).with_name("_boot") / "sitecustomize.py"))
    importlib.import_module(program).main()


class Forker:
    """The running programs, each with its client's connection.

    The key is a descriptor that becomes readable when the program ends.
    """

    def __init__(self, path: Path, program: str) -> None:
        self._program = program
        self._running: dict[int, tuple[int, socket.socket]] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)  # closed by the process that started this one

    def serve(self) -> None:
        """Serves until standard input is closed. Returns in each child, too, after its program."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    for pid, _ in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj is self._listener:
                    if self._fork():
                        return
                elif key.fd in self._running:
                    self._report_end(key.fd)
                elif key.data is not None:  # ckpt-chaos has killed the client
                    self._selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)

    def _fork(self) -> bool:
        """Returns True in the child, after its program, and False in the parent."""
        client, _ = self._listener.accept()
        text, given, _, _ = socket.recv_fds(client, _REQUEST_BYTES_MAX, 2)
        if (pid := os.fork()) == 0:
            self._selector.close()
            for one in (self._listener, client, *(other for _, other in self._running.values())):
                one.close()
            become(self._program, json.loads(text), *given)
            return True
        for fd in given:
            os.close(fd)
        ended = os.pidfd_open(pid)
        self._running[ended] = pid, client
        self._selector.register(ended, selectors.EVENT_READ)
        self._selector.register(client, selectors.EVENT_READ, pid)
        return False

    def _report_end(self, ended: int) -> None:
        pid, client = self._running.pop(ended)
        self._selector.unregister(ended)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(KeyError):  # the client was killed
            self._selector.unregister(client)
        with contextlib.suppress(OSError):
            client.send(str(code & 0xFF).encode())
        client.close()


def main(path: str, program: str, framework: str) -> None:
    for module in (*_COMMON, *_IMPORTS.get(framework, ())):
        importlib.import_module(module)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len([name for name in threads if name != _OF_JEMALLOC]) > 1:
        raise RuntimeError(f"the imports started threads ({threads}); a process that has some must not fork")
    gc.collect()
    gc.freeze()
    own = os.getpid()
    Forker(Path(path), program).serve()
    if os.getpid() == own:
        os._exit(0)  # what the frameworks do at exit is for a program that used them


if __name__ == "__main__":
    main(*sys.argv[1:])
