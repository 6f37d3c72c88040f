"""Failpoints: named places in the code at which a test kills, stops or fails this very process. Off unless armed.

The environment variable REPLICATED_CKPT_FAILPOINTS arms them when the process starts: `name=action`, separated by commas.
Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `raise` (FailpointReached), `sleep:SECONDS`. `action@N` acts
the N-th time, not the first. An agent inherits the variable from the rank that starts it. An unarmed failpoint costs one
look at an empty dictionary. The steps are those of docs/design.md, "A save".
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from replicated_ckpt.errors import ConfigInvalid

ENV = "REPLICATED_CKPT_FAILPOINTS"

POINTS: Mapping[str, str] = {
    "rank.registered": "step 1: a rank has posted its node; nothing of the save exists",
    "coordinator.drawn": "step 2: the save id is drawn, no agent has it",
    "store.intent-written": "step 2: an agent has written the intent and not made the staging directory",
    "store.opened": "step 2: an agent has opened the save and not answered",
    "coordinator.opened": "step 2: every agent has opened the save, no rank has the placement",
    "coordinator.placed": "step 2: the placement is on the blackboard",
    "rank.writing": "step 3: a rank has written its first item",
    "rank.handing-over": "step 3: a rank of an asynchronous save has laid its shard out, and not sent it to its agent",
    "agent.submitted": "step 3: an agent has a rank's shard in shared memory, and has written nothing of it",
    "agent.writing": "step 3: an agent has read the first bytes of a shard that was submitted",
    "rank.submitted": "step 3: the rank's agent has accepted its shard, no other node has a part of it",
    "agent.receiving": "step 3: an agent has received the first bytes of a copy",
    "store.recycled": "step 3: a recycled file has the name of a new shard's part, and still its old bytes",
    "store.shard-fsynced": "step 3: a shard is fsynced, and does not have its name yet (own store, or a buddy's)",
    "store.shard-named": "step 3: a shard has its name, durably (own store, or a buddy's)",
    "store.linked": "step 3: a shard is a hard link to a committed file, durably (own store, or a buddy's)",
    "rank.written": "step 3: a rank's shard and its copies are acknowledged",
    "rank.helped": "step 3: a rank has written the copy of another rank's shard from its own memory",
    "rank.receipted": "step 4: a rank has posted its receipt",
    "coordinator.accounted": "step 4: every shard has a receipt",
    "coordinator.metadata-staged": "step 5: the coordinator's node has .metadata, and no decision",
    "coordinator.submitted": "step 5: the coordinator's agent has the outline of the manifest, and needs no rank any more",
    "agent.finishing": "step 5: the coordinator's agent begins to finish the save, and has asked no node for its shards",
    "agent.decided": "step 5: the coordinator's agent has made the decision durable, and published nothing",
    "agent.finished": "step 6: the coordinator's agent has published the save, no other node has the decision",
    "coordinator.decided": "step 5: the decision is durable on the coordinator's node, no other node has it",
    "agent.decision-staged": "step 6: an agent has the decision, and no order to commit",
    "commit.checked": "step 6: the decision is verified, and nothing has changed in the staging directory",
    "commit.described": "step 6: manifest and metadata lie in the checkpoint's directory under second names",
    "commit.prepared": "step 6: all its files lie in that directory durably, and the replaced version has a second name",
    "commit.named": "step 6: the manifest has its name; stock torch still reads the replaced version",
    "commit.durable": "step 6: the save is published durably; the replaced version and the intent remain",
    "commit.done": "step 6: only the answer is missing",
    "coordinator.published": "step 7: all agents have answered, dcp.save has not returned",
    "upload.part-sent": "step 8: a part of a shard is in the bucket, the shard is not",
    "upload.shard-arrived": "step 8: a shard is in the bucket",
    "upload.manifest-put": "step 8: shards and manifest are in the bucket, without the mark that commits the checkpoint",
    "upload.marked": "step 8: the mark is in the bucket, and it has not been read back",
    "upload.slim-marked": "the mark of a slimmed save is in the bucket, and the optimizer's objects remain",
    "abort.undecided": "the decision of an aborted save is removed; its shards and intent remain",
    "restore.copied": "a missing copy was pulled from a peer",
    "retire.gone": "a removed version is marked as gone, not durably; all of its files remain",
    "retire.recycled": "the removed version's shards are in the pool of recycled files; its other files remain",
    "slim.described": "in a slim, the full metadata has a second name, and the smaller one the usual name",
    "slim.named": "the smaller manifest has its name, durably; the optimizer's files remain",
    "slim.dropped": "the optimizer's files are removed, the full metadata is not",
}
"""Every failpoint, with the state when it is reached."""


class FailpointReached(RuntimeError):
    """Raised by the action `raise`. It simulates a defect, so it is not one of our typed errors."""


Action = Callable[[str], None]
_armed: dict[str, Action] = {}


def reach(name: str) -> None:
    """Marks the place `name` of POINTS; runs the action of the failpoint, if it is armed."""
    if _armed and name in _armed:
        _armed[name](name)


@contextlib.contextmanager
def arm(name: str, action: Action) -> Iterator[None]:
    """Arms a failpoint of this process for the block. Two threads must not arm the same name at once."""
    _check(name)
    _armed[name] = action
    try:
        yield
    finally:
        _armed.pop(name, None)


def arm_from_environment(text: str) -> None:
    """Arms the failpoints in `text`, which has the format of the environment variable.

    Raises:
        ConfigInvalid: no such failpoint or action.
    """
    for entry in filter(None, text.split(",")):
        name, _, action = entry.partition("=")
        _armed[_check(name)] = _action(action)


def _check(name: str) -> str:
    if name not in POINTS:
        raise ConfigInvalid(f"{ENV}: there is no failpoint {name!r}.", "replicated_ckpt.failpoints.POINTS lists them.")
    return name


def _action(text: str) -> Action:
    kind, _, count = text.partition("@")
    kind, _, seconds = kind.partition(":")
    actions: Mapping[str, Action] = {
        "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
        # Sent to this thread: with a signal to the process, this thread may run on until another one has stopped it.
        "stop": lambda _: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
        "raise": _raise,
        "sleep": lambda _: time.sleep(float(seconds)),
    }
    if kind not in actions:
        raise ConfigInvalid(f"{ENV}: there is no action {text!r}.", f"Actions: {', '.join(actions)}.")
    return _count(actions[kind], int(count or 1))


def _raise(name: str) -> None:
    raise FailpointReached(name)


def _count(action: Action, nth: int) -> Action:
    lock = threading.Lock()
    left = nth

    def counted(name: str) -> None:
        nonlocal left
        # Several threads may reach the point at once: exactly one call is the N-th.
        with lock:
            left -= 1
            is_due = left == 0
        if is_due:
            action(name)

    return counted


if os.environ.get(ENV):
    arm_from_environment(os.environ[ENV])
