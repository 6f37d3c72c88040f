"""Re-protection does not restore a checkpoint whose id a save on this node is writing."""

import threading
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, introduced
from tests.agent.repair.test_reprotect import PAIR, agents, protected, stores

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

SAVE = "f" * 32


def test_a_copy_waits_for_the_save_that_is_open_under_its_name(tmp_path: Path) -> None:
    """The open save began without a checkpoint under its id, so it could not be published over a restored one.

    The torture test found this (seed 433745): a user removed the directory, and ranks saved that step again.
    """
    nodes = stores(tmp_path, 3)
    checkpointed(nodes[:2], 1, PAIR)
    blank = nodes[2]
    blank.node_id()
    blank.begin(Intent(SAVE, "step-1", "a session", overwrite=False))
    lock = blank.lock_save(SAVE)
    with agents([nodes[0], blank]) as running:
        line = f"ranks of this node are writing save {SAVE}"
        wait_for(lambda: line in (blank.root / "agent.out").read_text(), 30, "the log line of the wait")
        assert held(blank) == set()
        blank.abort(SAVE)
        lock.release()
        wait_for(lambda: held(blank) == set(PAIR), 30, "the copies of the blank node")
        wait_for(protected(*running), 30, "all copies")


def test_a_copy_waits_for_a_save_that_was_opened_just_now(tmp_path: Path) -> None:
    """The same holds before the ranks of the save have taken its lock."""
    other, blank = stores(tmp_path, 2)
    theirs = checkpointed([other], 1, {"__0_0.distcp": [0]}, copies=1, lineage="b" * 16)
    with running_agent(other.root) as agent:
        introduced(blank, [agent.endpoint.address()])
        service = NodeService(blank)
        service.open_save(Intent(SAVE, "step-1", "a session", overwrite=True))
        mender = Mender(service, Pace(1e12, threading.Event()))
        action = RestoreManifest(service.node_id, "step-1", theirs.save_id, (other.node_id(),))
        with pytest.raises(StoreUnavailable, match=f"ranks of this node are writing save {SAVE}"):
            mender.carry_out(action)
        service.abort(SAVE, "it is over")
        mender.carry_out(action)
    assert blank.catalog.checkpoint_of(theirs.save_id) == "step-1"
    assert findings(blank) == []
