"""The journal: what is over on a node is noted, and outlives its agent; what it has forgotten is not taken for that."""

import threading
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.core.layout import AGENT_DIR
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.core.upkeep.retention import Removal, RetentionPlan
from replicated_ckpt.errors import SaveAborted
from replicated_ckpt.node.saves.collector import BY_HAND, Collector
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories import journal
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.journal import End, Entry, Journal
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
    assert said_of(store, SAVE) == Answer.ABORTED.value, "it is aborted before the answer"
    assert said_of(store, SAVE) == Answer.ABORTED.value
    assert NodeService(store).state_of(SAVE) == {"state": Answer.ABSENT.value}, "to those that do not settle it"


def test_a_rank_that_gives_up_without_an_agent_leaves_the_note_too(store: LocalStore) -> None:
    """A coordinator's rank that aborts in its own store notes it there for the agent that comes later."""
    open_save(store, SAVE, store.node_id())
    store.abort(SAVE)
    assert said_of(store, SAVE) == Answer.ABORTED.value


def test_a_crash_before_the_note_leaves_the_intent_which_the_next_start_goes_by(store: LocalStore) -> None:
    """Nothing is staged any more: only the intent tells that this node coordinated the save."""
    open_save(store, SAVE, store.node_id())
    with (
        mock.patch.object(store.journal, "append_end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        store.abort(SAVE)
    assert not store.is_staged(SAVE)
    (intent,) = store.list_staged()
    NodeService(store).abort(intent.save_id, "its ranks have ended")
    assert said_of(store, SAVE) == Answer.ABORTED.value
    assert store.list_staged() == ()


@pytest.mark.parametrize("rule", ["beyond the newest 1", BY_HAND])
def test_what_retention_has_removed_is_noted(store: LocalStore, rule: str) -> None:
    """A node that was away when it was published has it staged, and another node of it may be lost for ever since.

    A removal by hand is by the user of one node alone.
    """
    made = checkpointed([store], 1, {"__0_0.distcp": [0]})
    assert said_of(store, made.save_id) == Answer.PUBLISHED.value
    collector = Collector(NodeService(store), threading.Event())
    if rule == BY_HAND:
        store.journal.append_end(made.save_id, End.REMOVING)
        collector.retire({}, (), (), in_doubt=False)
    else:
        removal = Removal(store.node_id(), made.checkpoint_id, made.save_id, rule)
        collector.carry_out(RetentionPlan(removals=(removal,)))
    assert store.catalog.checkpoint_of(made.save_id) is None
    assert said_of(store, made.save_id) == (Answer.ABSENT if rule == BY_HAND else Answer.ABORTED).value


def test_no_other_node_speaks_for_the_coordinators(store: LocalStore) -> None:
    """A node that did not coordinate a save says that it has nothing of it, never that it was aborted."""
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


@pytest.mark.parametrize("content", [b"", b"\xff", b"\0" * 80, f"{SAVE} abort\n{SAVE}".encode(), b"[" * 100_000])
def test_notes_that_cannot_be_believed_count_as_none(store: LocalStore, content: bytes) -> None:
    """Then nodes wait for each other's answers, and the next note is written."""
    open_save(store, SAVE, store.node_id())
    store.abort(SAVE)
    (store.root / AGENT_DIR / "journal").write_bytes(content)
    assert said_of(store, SAVE) == Answer.ABSENT.value
    open_save(store, ANOTHER, store.node_id())
    assert said_of(store, ANOTHER) == Answer.ABORTED.value


def test_the_oldest_are_forgotten(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is bounded, in memory and on disk: the newest ends stay, each once."""
    monkeypatch.setattr(journal, "ENTRIES_MAX", 2)
    monkeypatch.setattr(journal, "COMPACT_BYTES", 1)
    for save_id in (SAVE, ANOTHER, THIRD, THIRD):
        open_save(store, save_id, store.node_id())
        store.abort(save_id, "its rank failed")
    store.compact_journal()
    for notes in (store.journal, Journal(store.root)):
        assert notes.find_end(SAVE) is None
        assert notes.find_end(ANOTHER) == notes.find_end(THIRD) == Entry(End.ABORTED, "its rank failed")
    assert (store.root / AGENT_DIR / "journal").read_bytes().count(b"aborted") == 2


def test_what_is_over_is_not_opened_again(store: LocalStore) -> None:
    """A rank's opening that comes late, after a restart of the agent, too: the ranks get the reason that was noted."""
    for save_id, coordinator in ((SAVE, ELSEWHERE), (ANOTHER, store.node_id())):
        open_save(store, save_id, coordinator)
        NodeService(store).abort(save_id, "another save\novertook it")
        with pytest.raises(SaveAborted, match=r"another save.*overtook it"):
            NodeService(store).check_open(save_id)
        assert not store.is_staged(save_id)
    with pytest.raises(SaveAborted, match=r"another save.*overtook it"):
        NodeService(store).open_save(Intent(ANOTHER, "step-1", "s", overwrite=True, coordinator=store.node_id()))
    assert not store.is_staged(ANOTHER)


def test_a_note_after_one_that_a_crash_has_torn_counts(store: LocalStore) -> None:
    """Each line begins anew; what other processes append is seen, and a file that was put back is read from its start."""
    store.agent_directory()
    path, notes = store.root / AGENT_DIR / "journal", Journal(store.root)
    notes.append_end(SAVE, End.RETIRED)
    before = path.read_bytes()
    path.write_bytes(before + f"{ANOTHER} remov".encode())
    Journal(store.root).append_end(THIRD, End.REMOVING)
    assert [notes.find_end(each) for each in (ANOTHER, THIRD)] == [None, Entry(End.REMOVING)]
    path.write_bytes(before)
    assert [notes.find_end(each) for each in (SAVE, THIRD)] == [Entry(End.RETIRED), None]


def test_a_save_is_given_up_where_the_note_cannot_be_written(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk in trouble keeps no staged save: that only costs the others' answers."""
    open_save(store, SAVE, store.node_id())
    store.agent_directory()
    (store.root / AGENT_DIR / "journal").mkdir()
    store.abort(SAVE)
    assert store.list_staged() == ()
    assert "until all answer" in caplog.text
    assert said_of(store, SAVE) == Answer.ABSENT.value
