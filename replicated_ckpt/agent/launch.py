"""Finding this node's agent, or starting it: the first process that needs one does, all others use it."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.agent.endpoint import Endpoint, FileLock, client_lock, read_endpoint, single_agent_lock
from replicated_ckpt.agent.log_file import LOG_NAME, open_log
from replicated_ckpt.agent.surroundings import agent_environment, isolated_python
from replicated_ckpt.config import TLS_CERT_ENV
from replicated_ckpt.errors import AgentUnavailable, ReplicatedCkptError
from replicated_ckpt.stores.agent_client import AgentClient
from replicated_ckpt.stores.local import LocalStore
from replicated_ckpt.stores.tls import is_loopback, is_plain_allowed
from replicated_ckpt.version import __version__

START_TIMEOUT_S = 20.0
OTHERS_START_S = 5.0
STOP_TIMEOUT_S = 10.0
IDLE_EXIT_ENV = "REPLICATED_CKPT_AGENT_IDLE_S"
IDLE_EXIT_S = 60.0
_POLL_S = 0.005
_client_lock_by_root: dict[Path, FileLock] = {}


def ensured_agent(store: LocalStore, bind_host: str) -> Endpoint:
    """This node's running agent, started if there was none; it stays at least as long as this process.

    `bind_host` is where an agent that is started listens. One that listens on loopback only is replaced if other hosts
    must reach it, one that speaks plain HTTP if a certificate is set or other hosts must not be talked to so, and one of
    an older version by this one; each first finishes what it is asked at that moment, and the new one has its address.
    Safe to call from several processes and threads.

    Raises:
        AgentUnavailable: it could not be started or does not answer.
    """
    directory = store.agent_directory()
    _stay_client(store.root, directory)
    endpoint = _answering(directory, bind_host)
    if endpoint is not None:
        return endpoint
    with _starting(directory):
        return _answering(directory, bind_host) or _started(store, directory, bind_host)


def _stay_client(root: Path, directory: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while root not in _client_lock_by_root:
        lock = client_lock(directory)
        if lock is not None:
            _client_lock_by_root[root] = lock
        elif time.monotonic() > deadline:
            raise AgentUnavailable(f"The client lock in {directory} is held by a process that does not let go.")
        else:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _starting(directory: Path) -> Iterator[None]:
    """Held by the one process that starts the agent; the others wait until it has."""
    deadline = time.monotonic() + 2 * START_TIMEOUT_S
    while (lock := FileLock.taken(directory / "start")) is None:
        if time.monotonic() > deadline:
            raise AgentUnavailable(f"Another process has been starting the agent of {directory.parent} for too long.")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


def _answering(directory: Path, bind_host: str) -> Endpoint | None:
    """The agent if it runs, answers, and listens where it must."""
    endpoint = read_endpoint(directory)
    if endpoint is None:
        return None
    try:
        with AgentClient(endpoint.local_address()) as client:
            if client.call("GET", "/v1/status?brief=1").get("pid") != endpoint.pid:
                return None  # the one that has just started there, with the same token, has not written its own yet
            is_deaf = is_loopback(endpoint.host) and bind_host not in (endpoint.host, "localhost")
            is_plain = not endpoint.tls_sha256 and not (
                is_plain_allowed(bind_host) and not os.environ.get(TLS_CERT_ENV)
            )
            if is_deaf or is_plain or _is_older(endpoint.version, __version__):
                client.call("POST", "/v1/shutdown")
                _wait_until_gone(directory)
                return None
    except ReplicatedCkptError:
        return None
    return endpoint


def _is_older(version: str, than: str) -> bool:
    """Whether a released version comes before another; anything else is let be."""
    try:
        return [int(part) for part in version.split(".")] < [int(part) for part in than.split(".")]
    except ValueError:
        return False


def _wait_until_gone(directory: Path) -> None:
    """Waits for an agent that was told to stop to give its lock back."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (lock := single_agent_lock(directory)) is None:
        if time.monotonic() > deadline:
            raise AgentUnavailable(f"The agent of {directory.parent} was told to stop and has not.")
        time.sleep(_POLL_S)
    lock.release()


def _started(store: LocalStore, directory: Path, bind_host: str) -> Endpoint:
    idle_exit_s = os.environ.get(IDLE_EXIT_ENV, str(IDLE_EXIT_S))
    arguments = ["--root", str(store.root), "--host", bind_host, "--idle-exit-s", idle_exit_s]
    log = open_log(directory)
    try:
        process = subprocess.Popen(
            [*isolated_python(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=agent_environment(),
            start_new_session=True,
        )
    finally:
        os.close(log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        endpoint = _answering(directory, bind_host)
        if endpoint is not None:
            return endpoint
        if process.poll() is not None and process.returncode != 0:
            if not _is_nobody_there(directory) and time.monotonic() < deadline - START_TIMEOUT_S + OTHERS_START_S:
                time.sleep(_POLL_S)
                continue
            raise _unavailable(directory, f"it ended with exit code {process.returncode}")
        time.sleep(_POLL_S)
    process.kill()
    process.wait()
    raise _unavailable(directory, f"it did not answer within {START_TIMEOUT_S:.0f} s")


def _is_nobody_there(directory: Path) -> bool:
    """Whether no agent holds the root: one that has just been started by somebody else is waited for."""
    lock = single_agent_lock(directory)
    if lock is None:
        return False
    lock.release()
    return True


def _unavailable(directory: Path, why: str) -> AgentUnavailable:
    tail = (directory / LOG_NAME).read_bytes()[-800:].decode(errors="replace")
    return AgentUnavailable(f"The agent of {directory.parent} could not be started: {why}. End of its log: {tail!r}.")
