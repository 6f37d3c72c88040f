"""The sequence number of a save: a node that was unreachable at its start may have a newer number than the reachable
ones.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.dcp.agreement.decision import SaveDecision
from replicated_ckpt.dcp.agreement.nodes import Opened
from replicated_ckpt.dcp.save.numbering import choose_file_number, open_unreached
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.state.sequence_floor import SequenceFloor
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.checkpoints import checkpointed, findings, shard
from tests.dcp.load.test_silent_peers import decision_of

RUN = "a" * 16


def decided(store: LocalStore, sequence: int) -> SaveDecision:
    own = AgentAddress(store.node_id(), "127.0.0.1", 1, "token")
    return replace(decision_of(own), save_id="f" * 32, checkpoint_id="step-4", sequence=sequence, lineage=RUN)


@pytest.mark.parametrize("how", ["saved here", "reported by a peer"])
def test_a_node_refuses_a_save_older_than_one_it_has_seen(tmp_path: Path, how: str) -> None:
    """A node that was unreachable at the start refuses a save whose number is not above the newest that it has seen. A
    higher number is accepted.
    """
    store = LocalStore(tmp_path)
    if how == "saved here":
        checkpointed([store], 4, {shard(0): (0,)}, copies=1, size_bytes=3000, checkpoint_id="step-3", lineage=RUN)
    else:
        SequenceFloor(store.agent_directory()).raise_to({RUN: 4}, {}, "peer")
    for sequence in (3, 4):
        with pytest.raises(
            StoreUnavailable, match=f"number {sequence} of the run, but this node has seen number 4"
        ) as raised:
            open_unreached(store, decided(store, sequence), "host3")
        assert "load the newest checkpoint, then save" in raised.value.hint
        assert not store.list_staged()
    open_unreached(store, decided(store, 5), "host3")
    assert [intent.checkpoint_id for intent in store.list_staged()] == ["step-4"]
    assert findings(store) == []


def test_another_runs_saves_do_not_count(tmp_path: Path) -> None:
    """Sequence numbers count per lineage: another run's saves do not matter."""
    store = LocalStore(tmp_path)
    checkpointed([store], 9, {shard(0): (0,)}, copies=1, size_bytes=3000, checkpoint_id="step-3", lineage="b" * 16)
    open_unreached(store, decided(store, 1), "host3")
    assert store.list_staged()
    assert findings(store) == []


def test_two_open_saves_of_one_id_do_not_share_a_file_number(tmp_path: Path) -> None:
    """Two open saves of one id never use the same file number. Otherwise a node with both could publish only one of
    them.

    Source: torture, seed 924079.
    """
    store = LocalStore(tmp_path)
    first, second = "1" * 32, "2" * 32
    for save_id in (first, second):
        store.begin(Intent(save_id, "step-4", save_id, overwrite=True))
    assert store.find_taken_numbers("step-4", second) is None
    drawn = {choose_file_number(Opened({}, taken_numbers=None)) for _ in range(5)}
    assert len(drawn) > 1
    assert min(drawn) > 1000
    (store.staging(first) / "__3_7.distcp").write_bytes(b"x")
    assert store.find_taken_numbers("step-4", second) == frozenset({7})
    store.abort(first)
    assert store.find_taken_numbers("step-4", second) == frozenset()
    assert choose_file_number(Opened({}, taken_numbers=frozenset({0, 2, 9}))) == 4
    assert all(number % 4 == 0 for number in drawn)
    store.abort(second)
    assert findings(store) == []
