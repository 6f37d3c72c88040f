"""Agents that were told to stop, as the processes of their node see them: they open no save, and their end is awaited."""

import logging
import time
from pathlib import Path

from replicated_ckpt.agent.state.endpoint import LOCK_NAME, single_agent_lock
from replicated_ckpt.config import DRAIN_S
from replicated_ckpt.errors import AgentUnavailable

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
_POLL_S = 0.005
_leaving: set[Path] = set()


def note_leaving(directory: Path, *, is_leaving: bool) -> None:
    """Keeps what the agent of a directory said of itself when this process asked it last."""
    (_leaving.add if is_leaving else _leaving.discard)(directory)


def await_departure(directory: Path) -> bool:
    """Whether this directory's agent was told to stop when it was last asked; if so it has ended when this returns.

    Raises:
        AgentUnavailable: it does not end.
    """
    if directory not in _leaving:
        return False
    _leaving.discard(directory)
    log.info("a save waits for the end of the agent of %s, which was told to stop", directory.parent)
    wait_until_gone(directory)
    return True


def wait_until_gone(directory: Path) -> None:
    """Waits for an agent that was told to stop to finish the saves that are open, and to give its lock back."""
    deadline = time.monotonic() + DRAIN_S + STOP_TIMEOUT_S
    while (lock := single_agent_lock(directory)) is None:
        if time.monotonic() > deadline:
            raise AgentUnavailable(
                f"The agent of {directory.parent} was told to stop and has not.", held_hint(directory, LOCK_NAME)
            )
        time.sleep(_POLL_S)
    lock.release()


def held_hint(directory: Path, lock_name: str) -> str:
    """The next step where a process holds a lock for too long."""
    return (
        f"`fuser -v {directory / lock_name}` names its process: continue it (`kill -CONT`) if it is stopped, or kill it, "
        "and save or load again."
    )
