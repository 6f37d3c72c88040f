"""A node must fetch from another node that it has never met: the error says so, and how nodes are introduced."""

import threading
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.core.upkeep.repair_plan import Action, CopyShard, RestoreManifest
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.throttle import Pace
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import stores

KINDS = ["copy", "take over"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_was_never_introduced_is_named(tmp_path: Path, kind: str) -> None:
    """The plan of `repair` names a source whose address is not in this node's book."""
    nodes = stores(tmp_path, 2)
    on = [0, 1] if kind == "copy" else [0]
    manifest = checkpointed(nodes, 1, {shard(0): (0,)}, copies=2, on=on)
    here, there = nodes[1].node_id(), nodes[0].node_id()
    actions: dict[str, Action] = {
        "copy": CopyShard(here, "step-1", manifest.save_id, shard(0), 1000, (there,), False),
        "take over": RestoreManifest(here, "step-1", manifest.save_id, (there,)),
    }
    mender = Mender(NodeService(nodes[1]), Pace(1e15, threading.Event()))
    with pytest.raises(StoreUnavailable, match=f"find 'node {there}'") as raised:
        mender.carry_out(actions[kind])
    assert f"address book of node {here}" in str(raised.value)
    assert "Run a job with ranks on both nodes: its first save or load introduces them" in str(raised.value)
