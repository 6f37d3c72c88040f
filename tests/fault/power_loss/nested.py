"""A second power loss while a node recovers from the first: the restart is recorded too, and the power can fail at any
moment of it.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from replicated_ckpt.errors import SaveAborted, StoreError
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.fault.power_loss.operations import Log, Mark, build, disk_of
from tests.fault.power_loss.recorder import Recorder
from tests.fault.power_loss.replay import CrashState, Promises
from tests.fault.power_loss.restart import OTHER_PID, restart
from tests.fault.power_loss.scenarios import CHECKPOINT, NEW, NEXT, STORE, no_mark, save


def promises_of(log: Log) -> Promises:
    return {operation.subject: operation.allowed for operation in log.operations if isinstance(operation, Mark)}


def restarted(store: LocalStore) -> None:
    """An agent starts, and a load begins."""
    restart(store)


def settled_by_next_save(store: LocalStore) -> None:
    """A process without an agent opens its next save of the same checkpoint, and settles the earlier one."""
    service = NodeService(store)
    settle(service, service.open_save(Intent(NEXT, CHECKPOINT, "session", overwrite=True))[1], ())


def committed_again(store: LocalStore) -> None:
    """A caller that got no answer repeats the commit."""
    with contextlib.suppress(SaveAborted, StoreError):
        store.commit(NEW)


def saved_again(store: LocalStore) -> None:
    """An agent starts, and the node makes a save."""
    restart(store)
    listed = {name: manifest.save_id for name, manifest in store.catalog.committed()}
    save(store, no_mark, NEXT, before=listed.get(CHECKPOINT))


def gone_on_after_kill(log: Log, position: int, base: Path, go_on: Callable[[LocalStore], None] = restarted) -> Log:
    """The process is killed after the first `position` operations, and the node continues with `go_on`. Returns the log
    of both.

    Operations that were not durable at the kill stay not durable, so a later power loss can still lose them.
    """
    before = log.up_to(position)
    build(before.replayed().tree(), base)
    return _gone_on(Recorder(base, before), promises_of(before), go_on)


def restarted_after_power_loss(state: CrashState, base: Path) -> Log:
    """The log of the restart after a power loss. All that the power loss left is durable."""
    build(state.tree, base)
    log = Log(disk_of(state.tree), [Mark(subject, allowed) for subject, allowed in state.promises.items()])
    return _gone_on(Recorder(base, log), state.promises, restarted)


def _gone_on(recorder: Recorder, promises: Promises, go_on: Callable[[LocalStore], None]) -> Log:
    """Records `go_on`. The promises are those made before; once it has ended, the node promises exactly what it holds
    then.

    The promise of durable shards ends: with no peer to ask, the node drops the shards of an undecided save.
    """
    store = LocalStore(recorder.base / STORE)
    for subject, allowed in promises.items():
        if subject.startswith("durable "):
            recorder.mark(subject)
        elif subject.startswith("checkpoint ") and go_on is saved_again:
            recorder.mark(subject, *allowed, NEXT)
    with recorder, mock.patch("os.getpid", return_value=OTHER_PID):
        go_on(store)
        recorder.mark("node", store.node_id())
        listed = {name: manifest.save_id for name, manifest in store.catalog.committed()}
        for subject in promises:
            kind, _, name = subject.partition(" ")
            if kind == "checkpoint":
                recorder.mark(subject, listed.get(name))
    return recorder.log
