"""Finds this node's agent, starts one if none runs, and waits for one that exits."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from replicated_ckpt.agent.state.endpoint import (
    ALREADY_SERVED,
    LOCK_NAME,
    Endpoint,
    client_lock,
    has_permanent_agent,
    is_free,
    listening_endpoint,
    read_endpoint,
)
from replicated_ckpt.agent.state.log_file import LOG_NAME, open_log
from replicated_ckpt.config import DRAIN_S
from replicated_ckpt.environment import TLS_CERT_ENV
from replicated_ckpt.errors import AgentUnavailable, ConfigInvalid, ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import closing_fd, is_there
from replicated_ckpt.stores.files.locks import FileLock, holder_of, is_stopped
from replicated_ckpt.stores.files.ownership import is_of_another
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import RELEASES_HINT
from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S, AgentClient
from replicated_ckpt.stores.peer.tls import is_loopback, is_plain_allowed
from replicated_ckpt.stores.threads import FEWER
from replicated_ckpt.version import PROTOCOL, __version__

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
_leaving: dict[Path, Endpoint] = {}


def note_leaving(directory: Path, agent: Endpoint, *, is_leaving: bool) -> None:
    """Records whether the agent of a directory was leaving when this process asked it last."""
    if is_leaving:
        _leaving[directory] = agent
    else:
        _leaving.pop(directory, None)


def await_departure(directory: Path) -> bool:
    """If this directory's agent was leaving when it was last asked: waits for its end and returns True.

    Raises:
        AgentUnavailable: it does not end.
    """
    agent = _leaving.pop(directory, None)
    if agent is None:
        return False
    log.info("a save waits until the stopping agent of %s has exited", directory.parent)
    wait_until_gone(directory, agent)
    return True


def wait_until_gone(directory: Path, agent: Endpoint) -> None:
    """Waits until an agent that was told to stop has finished its open saves and released its lock.

    Another agent may take that lock first. Then that agent serves when this returns.
    """
    deadline = time.monotonic() + DRAIN_S + STOP_TIMEOUT_S
    while not (is_free(directory) or _is_followed(directory, agent)):
        # It may be stopped (SIGSTOP), or hang on a dead disk: a rank must not wait for ever.
        if time.monotonic() > deadline:
            raise AgentUnavailable(
                f"The agent of {directory.parent} was asked to stop, but still runs.", lock_hint(directory, LOCK_NAME)
            )
        time.sleep(_POLL_S)


def _is_followed(directory: Path, agent: Endpoint) -> bool:
    """Whether another agent serves now. Its pid may be the same, as in a restarted container."""
    now = read_endpoint(directory)
    return now is not None and (now.pid, now.incarnation) != (agent.pid, agent.incarnation)


def lock_hint(directory: Path, lock_name: str) -> str:
    """The next step if a process holds a lock for too long."""
    pid = holder_of(directory / lock_name)
    if pid is None:
        return (
            f"`fuser -v {directory / lock_name}` names its process. If it is stopped, resume it (`kill -CONT`), else "
            "kill it; then save or load again."
        )
    if is_stopped(pid):
        return (
            f"Process {pid} holds {directory / lock_name} and is stopped: `kill -CONT {pid}`, then save or load again."
        )
    return f"Process {pid} holds {directory / lock_name}: check what it does, or kill it; then save or load again."


def should_replace(directory: Path, endpoint: Endpoint, bind_host: str | None) -> bool:
    """Whether this process replaces the agent, as `ensure_agent` describes.

    An older agent that does not exit when idle, for example one of systemd, is not replaced: systemd would start it again.
    """
    wanted_host = bind_host or "localhost"
    is_unreachable = is_loopback(endpoint.host) and wanted_host not in (endpoint.host, "localhost")
    is_plain = not endpoint.tls_sha256 and (bool(os.environ.get(TLS_CERT_ENV)) or not is_plain_allowed(wanted_host))
    return is_unreachable or is_plain or (_is_older(endpoint) and not has_permanent_agent(directory))


def check_running(directory: Path, endpoint: Endpoint) -> None:
    """Checks that this process can use the agent.

    Raises:
        ConfigInvalid: the agent has a newer protocol. Or it has an older one, and this process may not replace it.
    """
    if endpoint.protocol > PROTOCOL or (endpoint.protocol < PROTOCOL and has_permanent_agent(directory)):
        raise ConfigInvalid(
            f"The agent of node {endpoint.node_id} on {socket.gethostname()} runs replicated_ckpt {endpoint.version} "
            f"(protocol {endpoint.protocol}), but this rank runs {__version__} (protocol {PROTOCOL}).",
            RELEASES_HINT,
        )


def _is_older(endpoint: Endpoint) -> bool:
    """Whether the agent has an older protocol, or is an earlier release. Development versions do not count as older."""
    try:
        is_before = [int(part) for part in endpoint.version.split(".")] < [int(part) for part in __version__.split(".")]
    except ValueError:
        is_before = False  # a development version, whose name has no order
    return endpoint.protocol < PROTOCOL or is_before


_PREFIXES = ("REPLICATED_CKPT_", "LC_")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_NAMES = {
    "PATH", "HOME", "TMPDIR", "LANG", "TZ",
    "LD_LIBRARY_PATH",  # without it the rank's own Python may not start
    # The network path to an object store. The rank that names the store sends the agent its credentials.
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", *_PROXIES, *(name.lower() for name in _PROXIES),
    # Credentials in files, or of a pod's role: no option of a client carries them.
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE", "AWS_EC2_METADATA_DISABLED",
    "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
}  # fmt: skip
_DEPENDENCIES = ("fastcrc", "cryptography", "fsspec", "s3fs")


def agent_environment() -> dict[str, str]:
    """The variables of this process that an agent inherits if this process starts it."""
    return {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}


def isolated_python() -> list[str]:
    """The command that runs the agent of this very package in this Python. The agent's own arguments follow."""
    package = Path(__file__).resolve().parents[1]
    homes = [str(package.parent), *filter(None, map(_find_home, _DEPENDENCIES))]
    options = ["-I", "-X", f"utf8={sys.flags.utf8_mode}"]  # names of files are encoded as in this process
    return [sys.executable or "", *options, str(Path(__file__).with_name("isolated.py")), *dict.fromkeys(homes), "--"]


def _find_home(module: str) -> str | None:
    """The folder from which this process imports a dependency; None if it is not installed."""
    spec = find_spec(module)
    return str(Path(spec.origin).resolve().parents[1]) if spec is not None and spec.origin else None


START_TIMEOUT_S = 20.0
STOPPED_TIMEOUT_S = 5.0
"""The limit for the start of an agent whose process is stopped (SIGSTOP)."""
SILENT_TIMEOUT_S = 1.0
"""The time-out for an agent that did not answer this process the last time."""
IDLE_EXIT_ENV = "REPLICATED_CKPT_AGENT_IDLE_S"
IDLE_EXIT_S = 60.0  # a trainer that crashed is back by then, and finds its agent
_POLL_S = 0.005
_TAIL_LINES, _TAIL_CHARS = 10, 1000
_client_lock_by_root: dict[Path, FileLock] = {}
_silent_by_directory: dict[Path, int] = {}


def ensure_agent(store: LocalStore, bind_host: str | None = None, *, is_opening: bool = False) -> Endpoint:
    """This node's running agent, started if there was none. The agent does not exit as idle while this process runs.

    `is_opening`: a save opens now. An agent that is told to stop meanwhile first completes that save.

    `bind_host`: where a new agent listens. None: where the nodes that it has met reach it; a running agent may listen
    anywhere. A running agent is replaced in these cases:
    - It listens on loopback alone, and other hosts must reach it.
    - It uses plain HTTP, and a certificate is set or other hosts must be reached by TLS.
    - It is older than this release, and exits when idle.

    The replaced agent first finishes its requests. The new agent has the same address. Safe to call from several processes
    and threads at once: one of them starts the agent.

    Raises:
        AgentUnavailable: the agent could not be started, or it runs and does not answer. ConfigInvalid: its release has
            another protocol.
    """
    directory = store.agent_directory()
    # Before the agent is asked: an idle one leaves only while no process holds this lock.
    _stay_client(store.root, directory)
    endpoint = _find_answering(directory, bind_host, is_opening=is_opening)
    if endpoint is not None:
        return endpoint
    began = time.time()
    with _take_start(directory) as lock:
        # Looked for again under the lock: another process may have started it meanwhile.
        endpoint = _find_answering(directory, bind_host, is_opening=is_opening)
        if endpoint is not None:
            return endpoint
        _raise_failure_since(began, lock.path)
        try:
            with translate_errors(str(store.root), "start", "agent"):
                return _start(store, directory, bind_host, is_opening=is_opening)
        except AgentUnavailable as exc:
            with contextlib.suppress(OSError):  # on a full disk, each process that waits makes its own attempt
                lock.path.write_text(json.dumps({"unix_s": time.time(), "why": exc.message, "hint": exc.hint}))
            raise


def running_agent(store: LocalStore) -> Endpoint | None:
    """This node's agent, if one runs. Starts and writes nothing.

    Raises:
        AgentUnavailable: it runs and does not answer.
    """
    directory = store.root_agent_directory()
    endpoint = listening_endpoint(directory)
    return endpoint if endpoint is not None and _answers(directory, endpoint) else None


def can_hold_agent(store: LocalStore) -> bool:
    """Whether an agent can be started for this store: its root is not a read-only file system, and this user may write it.

    Raises:
        StoreError: the disk cannot be read.
    """
    place = store.root_agent_directory()
    with translate_errors(str(store.root), "look at", place.name):
        # Nothing is made to find out: the root may be read-only, or not exist yet.
        while not is_there(place):
            place = place.parent
    return os.access(place, os.W_OK | os.X_OK)


def is_only_read(store: LocalStore) -> bool:
    """Whether the store belongs to another user, and is not writable for this one.

    Its checkpoints can be read. Its agent's files, which name hosts and tokens, are not used.
    """
    return not can_hold_agent(store) and is_of_another(store.root_agent_directory())


def _stay_client(root: Path, directory: Path) -> None:
    held = _client_lock_by_root.get(root)
    if held is not None and held.is_locked:  # a forked process does not hold its parent's lock
        return
    lock = client_lock(directory, START_TIMEOUT_S)
    if lock is None:
        raise AgentUnavailable(
            f"A process does not release the client lock in {directory}.",
            lock_hint(directory, "clients"),
        )
    _client_lock_by_root[root] = lock


def _take_start(directory: Path) -> FileLock:
    """The lock of the one process that starts the agent; the others wait for it."""
    lock = FileLock.take_within(directory / "start", 2 * START_TIMEOUT_S)
    if lock is None:
        raise AgentUnavailable(
            f"Another process has not finished starting the agent of {directory.parent}.",
            lock_hint(directory, "start"),
        )
    return lock


def _raise_failure_since(began: float, path: Path) -> None:
    """Raises the error of another process that failed to start the agent meanwhile: one time-out a node is enough."""
    try:
        found = json.loads(path.read_bytes() or b"{}")
    except ValueError:  # its process was killed while it wrote
        return
    if began <= found.get("unix_s", 0) <= time.time():
        raise AgentUnavailable(found["why"], found.get("hint"))


def _answers(directory: Path, endpoint: Endpoint, *, is_opening: bool = False) -> bool:
    """Whether the agent runs and answers.

    Raises:
        AgentUnavailable: it runs and does not answer. This process's next request to it has a shorter time-out.
    """
    timeout_s = PROGRESS_TIMEOUT_S if _silent_by_directory.get(directory) != endpoint.pid else SILENT_TIMEOUT_S
    try:
        with AgentClient(endpoint.local_address(), timeout_s) as client:
            told = client.call("GET", f"/v1/status?brief=1{'&opening=1' if is_opening else ''}")
    except StoreUnavailable as exc:
        # A refused connection means that the agent has ended. A time-out may come from a stopped process.
        if not isinstance(exc.__cause__, TimeoutError):
            return False
        _silent_by_directory[directory] = endpoint.pid
        if is_free(directory):  # the agent has died, and another program, which does not answer, has its port
            return False
        raise _silence_error(directory, endpoint) from exc
    except ReplicatedCkptError:
        return False
    _silent_by_directory.pop(directory, None)
    note_leaving(directory, endpoint, is_leaving=told.get("is_leaving") is True)
    return told.get("pid") == endpoint.pid  # else a new agent answers, which has not written its endpoint yet


def _silence_error(directory: Path, endpoint: Endpoint) -> AgentUnavailable:
    return AgentUnavailable(
        f"The agent of node {endpoint.node_id} (pid {endpoint.pid}) does not answer; it may be stopped.",
        f"If it is stopped, run `kill -CONT {endpoint.pid}`. If it hangs, run `kill -9 {endpoint.pid}`: the next save or "
        f"load starts another agent. Its log is {directory / LOG_NAME}.",
    )


def _find_answering(directory: Path, bind_host: str | None, *, is_opening: bool) -> Endpoint | None:
    """The agent if it runs, answers, and listens where it must: anywhere if `bind_host` is None.

    Raises:
        AgentUnavailable: it runs and does not answer. ConfigInvalid: its release has another protocol.
    """
    endpoint = listening_endpoint(directory)
    if endpoint is None:
        return None
    is_replaced = should_replace(directory, endpoint, bind_host)
    if not _answers(directory, endpoint, is_opening=is_opening and not is_replaced):  # else it would stay for that save
        return None
    check_running(directory, endpoint)
    if not is_replaced:
        return endpoint
    try:
        with AgentClient(endpoint.local_address()) as client:
            client.call("POST", "/v1/shutdown")
        wait_until_gone(directory, endpoint)
    except ReplicatedCkptError as exc:
        log.warning("the agent of %s is replaced: %s", directory.parent, exc)
    return None


class _Outliving(subprocess.Popen[bytes]):
    """A process that outlives this one. It raises no ResourceWarning, which `python -W error` would turn into an error."""

    def __del__(self) -> None:
        super().__del__(_warn=lambda *_, **__: None)  # type: ignore[call-arg]  # CPython's own, as of 3.11 to 3.14


def spawn_agent(arguments: Sequence[str], log: int) -> "subprocess.Popen[bytes]":
    """Starts the process of an agent, in a session of its own, because it outlives this process. `log`: its log file."""
    return _Outliving(
        [*isolated_python(), *arguments],
        stdin=subprocess.DEVNULL,  # it must not read what is typed for the job
        stdout=log,
        stderr=log,
        cwd="/",  # it outlives the job, and must not keep a file system from being unmounted
        env=agent_environment(),
        start_new_session=True,  # torchrun and Slurm kill the rank's process group
    )


def _start(store: LocalStore, directory: Path, bind_host: str | None, *, is_opening: bool) -> Endpoint:
    idle_exit_s = os.environ.get(IDLE_EXIT_ENV, str(IDLE_EXIT_S))
    arguments = ["--root", str(store.root), *(["--host", bind_host] if bind_host else []), "--idle-exit-s", idle_exit_s]
    process, log_begins = _spawn(directory, arguments)
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < START_TIMEOUT_S:
        try:
            endpoint = _find_answering(directory, bind_host, is_opening=is_opening)
        except AgentUnavailable:
            if process.poll() is not None:  # another agent has the root, and does not answer
                raise
            continue
        if endpoint is not None:
            return endpoint
        if process.poll() is not None:
            is_root_free = is_free(directory)  # read once: an agent that has just died may release it between two looks
            if is_root_free and process.returncode == ALREADY_SERVED:  # the agent that served it has died since
                process, log_begins = _spawn(directory, arguments)
            elif is_root_free:
                raise _unavailable(directory, f"it ended with exit code {process.returncode}", log_begins)
            elif waited_s > STOPPED_TIMEOUT_S and _is_holder_stopped(directory):
                break
        time.sleep(_POLL_S)
    if process.poll() is not None:
        raise AgentUnavailable(
            f"Another agent of {store.root} has not answered for {waited_s:.0f} s; it may be stopped. "
            f"{_quote_log(directory, log_begins)}.",
            lock_hint(directory, LOCK_NAME),
        )
    # The start is reported as failed: this agent must not begin to serve later, next to another one.
    process.kill()
    process.wait()
    raise _unavailable(directory, f"it did not answer within {START_TIMEOUT_S:.0f} s", log_begins)


def _spawn(directory: Path, arguments: Sequence[str]) -> "tuple[subprocess.Popen[bytes], int]":
    with closing_fd(open_log(directory)) as log:
        log_begins = os.fstat(log).st_size  # earlier lines are from other agents, and would mislead
        try:
            return spawn_agent(arguments, log), log_begins
        except BlockingIOError as exc:
            raise AgentUnavailable(
                f"The agent of {directory.parent} cannot be started: {exc.strerror}.", FEWER
            ) from exc
        except OSError as exc:
            raise _unavailable(directory, f"{type(exc).__name__}: {exc.strerror}", log_begins) from exc


def _is_holder_stopped(directory: Path) -> bool:
    """Whether the holder of the root's lock is stopped. A holder that is not stopped may wait for a slow disk."""
    pid = holder_of(directory / LOCK_NAME)
    return pid is not None and is_stopped(pid)


def _unavailable(directory: Path, why: str, log_begins: int) -> AgentUnavailable:
    return AgentUnavailable(
        f"The agent of {directory.parent} could not be started with this process's Python, {sys.executable!r}: {why}. "
        f"{_quote_log(directory, log_begins)}.",
        "Fix the cause. Or start an agent by hand, which the ranks then use: `replicated-ckpt agent --root "
        f"{directory.parent}`.",
    )


def _quote_log(directory: Path, log_begins: int) -> str:
    lines = (directory / LOG_NAME).read_bytes()[log_begins:].decode(errors="replace").splitlines()
    tail = "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARS:]
    return f"End of its log: {tail!r}" if tail else "Its log is empty"
