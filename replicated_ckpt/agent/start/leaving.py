"""Agents that were told to stop, from the view of their node's processes: these wait for the end of such an agent."""

import logging
import time
from pathlib import Path

from replicated_ckpt.agent.state.endpoint import LOCK_NAME, Endpoint, is_free, read_endpoint
from replicated_ckpt.config import DRAIN_S
from replicated_ckpt.errors import AgentUnavailable
from replicated_ckpt.stores.files.locks import holder_of, is_stopped

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
_POLL_S = 0.005
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
    log.info("a save waits for the agent of %s to exit, which is stopping", directory.parent)
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
    """The next step where a process holds a lock for too long."""
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
