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
    "coordinator.drawn": "step 2: the save id is drawn, no agent knows it",
    "store.intent-written": "step 2: an agent has written the intent and not made the staging directory",
    "store.opened": "step 2: an agent has opened the save and not answered",
    "coordinator.opened": "step 2: every agent has opened the save, no rank knows the decision about places",
    "coordinator.placed": "step 2: the decision about places is on the blackboard",
    "rank.writing": "step 3: a rank has written its first item",
    "rank.handing-over": "step 3: a rank of an asynchronous save knows its shard's layout, its agent does not",
    "agent.submitted": "step 3: an agent has a rank's shard in shared memory, and has written nothing of it",
    "agent.writing": "step 3: an agent has read the first bytes of a shard that was submitted",
    "rank.submitted": "step 3: the rank's agent has taken its shard, no other node knows it",
    "agent.receiving": "step 3: an agent has received the first bytes of a copy",
    "store.recycled": "step 3: a recycled file is the part of a new shard, with its old bytes",
    "store.shard-fsynced": "step 3: a shard is fsynced and has not got its name (own store, or a buddy's)",
    "store.shard-named": "step 3: a shard has its name, durably (own store, or a buddy's)",
    "store.linked": "step 3: a shard is one more name of a committed one's file, durably (own store, or a buddy's)",
    "rank.written": "step 3: a rank's shard and its copies are acknowledged",
    "rank.helped": "step 3: a rank has written the copy of another rank's shard from its own memory",
    "rank.receipted": "step 4: a rank has posted its receipt",
    "coordinator.accounted": "step 4: every shard is accounted for",
    "coordinator.metadata-staged": "step 5: the coordinator's node has .metadata, and no decision",
    "coordinator.submitted": "step 5: the coordinator's agent has the outline of the manifest, and needs no rank more",
    "agent.finishing": "step 5: the same, and it has asked no node yet what was written",
    "agent.decided": "step 5: the coordinator's agent has made the decision durable, and published nothing",
    "agent.finished": "step 6: the coordinator's agent has published the save, no other node knows it",
    "coordinator.decided": "step 5: the decision is durable on the coordinator's node, no other node knows it",
    "agent.decision-staged": "step 6: an agent has been sent the decision and has not been told to commit",
    "commit.checked": "step 6: the decision is believed, the staging directory as it was",
    "commit.described": "step 6: manifest and metadata lie in the directory of the checkpoint, without its name",
    "commit.prepared": "step 6: all of the save lies there durably, and what it replaces has a second name",
    "commit.named": "step 6: the manifest has its name; stock torch reads the version that is replaced still",
    "commit.durable": "step 6: the save is published durably; what it replaced, and its intent, are still there",
    "commit.done": "step 6: everything is done but the answer",
    "coordinator.published": "step 7: all agents have answered, dcp.save has not returned",
    "upload.part-sent": "step 8: a part of a shard is in the bucket, the shard is not",
    "upload.shard-arrived": "step 8: a shard is in the bucket",
    "upload.manifest-put": "step 8: shards and manifest are in the bucket, and no mark: it is no checkpoint there",
    "upload.marked": "step 8: the mark is in the bucket, and it has not been read back",
    "upload.slim-marked": "the mark of a save's weights is in the bucket, and so are its optimizer's objects",
    "abort.undecided": "a save that is aborted has no decision any more, its shards and its intent are still in place",
    "restore.copied": "a missing copy was pulled from a peer",
    "retire.gone": "a version that is removed is marked as gone, not durably; all of its files are there",
    "retire.recycled": "its shards are in the pool of recycled files, the rest of it is still there",
    "slim.described": "the full metadata of a version that is slimmed has a second name, the smaller one the first",
    "slim.named": "the smaller manifest has its name, durably; the optimizer's files are all there",
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
    """Arms a failpoint of this process for a block. Not for concurrent use with the same name."""
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
        # To this thread: a signal to the process stops it only after some other thread has run on for a while.
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
