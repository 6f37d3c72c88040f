"""What a coordinator's node has given up is noted, and outlives its agent; what it has forgotten is not taken for that."""

import json
import threading
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.agent.repair.retire import BY_HAND, Retirer
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.layout import AGENT_DIR
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.core.upkeep.retention import Removal, RetentionPlan
from replicated_ckpt.stores.local.directories import given_up
from replicated_ckpt.stores.local.directories.given_up import GivenUpNotes
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import checkpointed

SAVE, ANOTHER, THIRD = "1" * 32, "2" * 32, "3" * 32
ELSEWHERE = "0" * 11 + "a"


def open_save(store: LocalStore, save_id: str, coordinator: str) -> None:
    store.begin(Intent(save_id, "step-1", "s", overwrite=True, coordinator=coordinator))


def said_of(store: LocalStore, save_id: str) -> str:
    """What the node's next agent says to a node that settles the save."""
    return str(NodeService(store).answer_to_settle(save_id, is_over=True, is_left=True)["state"])


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_the_coordinators_node_says_so_after_its_agent_was_started_again(store: LocalStore) -> None:
    """The node that has given a save up notes it before it says so: the answer is the same after a restart."""
    open_save(store, SAVE, store.node_id())
    assert said_of(store, SAVE) == Answer.GIVEN_UP.value, "it is given up before the answer"
    assert said_of(store, SAVE) == Answer.GIVEN_UP.value
    assert NodeService(store).state_of(SAVE) == {"state": Answer.ABSENT.value}, "to those that do not settle it"


def test_a_rank_that_gives_up_without_an_agent_leaves_the_note_too(store: LocalStore) -> None:
    """A coordinator's rank that aborts in its own store notes it there for the agent that comes later."""
    open_save(store, SAVE, store.node_id())
    store.abort(SAVE)
    assert said_of(store, SAVE) == Answer.GIVEN_UP.value


def test_a_crash_before_the_note_leaves_the_intent_which_the_next_start_goes_by(store: LocalStore) -> None:
    """Nothing is staged any more: only the intent tells that this node coordinated the save."""
    open_save(store, SAVE, store.node_id())
    with mock.patch.object(store.given_up, "note", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.abort(SAVE)
    assert not store.is_staged(SAVE)
    (intent,) = store.list_staged()
    NodeService(store).abort(intent.save_id, "its ranks are gone")
    assert said_of(store, SAVE) == Answer.GIVEN_UP.value
    assert store.list_staged() == ()


@pytest.mark.parametrize("rule", ["beyond the newest 1", BY_HAND])
def test_what_retention_has_removed_is_noted(store: LocalStore, rule: str) -> None:
    """A node that was away when it was published has it staged, and another node of it may be lost for ever since.

    A removal by hand is by the user of one node alone.
    """
    made = checkpointed([store], 1, {"__0_0.distcp": [0]})
    assert said_of(store, made.save_id) == Answer.PUBLISHED.value
    removal = Removal(store.node_id(), made.checkpoint_id, made.save_id, rule)
    Retirer(NodeService(store), threading.Event()).carry_out(RetentionPlan(removals=(removal,)))
    assert store.catalog.checkpoint_of(made.save_id) is None
    assert said_of(store, made.save_id) == (Answer.ABSENT if rule == BY_HAND else Answer.GIVEN_UP).value


def test_no_other_node_speaks_for_the_coordinators(store: LocalStore) -> None:
    """A node that did not coordinate a save says that it has nothing of it, never that it was given up."""
    store.node_id()
    open_save(store, SAVE, ELSEWHERE)
    store.abort(SAVE)
    assert said_of(store, SAVE) == Answer.ABSENT.value
    assert said_of(store, ANOTHER) == Answer.ABSENT.value, "it has never heard of it"


@pytest.mark.parametrize("manifest", [b"", b"damaged"])
def test_what_may_have_been_decided_is_not_said_to_be_given_up(store: LocalStore, manifest: bytes) -> None:
    """It is removed once a newer save is whole, or as its operator says; another node may have published it."""
    open_save(store, SAVE, store.node_id())
    (store.staging(SAVE) / ".manifest.json").write_bytes(manifest)
    store.abort(SAVE)
    assert store.list_staged() == ()
    assert said_of(store, SAVE) == Answer.ABSENT.value


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'["x", 3]', b"[" * 100_000])
def test_notes_that_cannot_be_believed_count_as_none(store: LocalStore, content: bytes) -> None:
    """Then nodes wait for each other's answers, and the next note is written."""
    open_save(store, SAVE, store.node_id())
    store.abort(SAVE)
    (store.root / AGENT_DIR / "given-up.json").write_bytes(content)
    assert said_of(store, SAVE) == Answer.ABSENT.value
    open_save(store, ANOTHER, store.node_id())
    assert said_of(store, ANOTHER) == Answer.GIVEN_UP.value


def test_the_oldest_are_forgotten(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of saves that were given up are bounded: the newest stay, each once."""
    monkeypatch.setattr(given_up, "GIVEN_UP_MAX", 2)
    for save_id in (SAVE, ANOTHER, THIRD, THIRD):
        open_save(store, save_id, store.node_id())
        store.abort(save_id)
    notes = GivenUpNotes(store.root)
    assert [notes.has(save_id) for save_id in (SAVE, ANOTHER, THIRD)] == [False, True, True]
    assert json.loads((store.root / AGENT_DIR / "given-up.json").read_bytes()) == [ANOTHER, THIRD]


def test_a_save_is_given_up_where_the_note_cannot_be_written(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk in trouble keeps no staged save: that only costs the others' answers."""
    open_save(store, SAVE, store.node_id())
    store.agent_directory()
    (store.root / AGENT_DIR / "given-up.json").mkdir()
    store.abort(SAVE)
    assert store.list_staged() == ()
    assert "once all others answer" in caplog.text
    assert said_of(store, SAVE) == Answer.ABSENT.value
