"""The journal records how a node's saves ended. It outlives the agent, and a save without an entry is not taken for an
ended one.
"""

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


def answer_about(store: LocalStore, save_id: str) -> str:
    """The state that the node's next agent returns to a node that settles the save."""
    return str(NodeService(store).answer_to_settle(save_id, is_over=True, is_left=True)["state"])


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_the_coordinators_node_answers_the_same_after_a_restart(store: LocalStore) -> None:
    """The coordinator's node journals an abort before it answers: the answer after a restart is the same."""
    open_save(store, SAVE, store.node_id())
    assert answer_about(store, SAVE) == Answer.ABORTED.value, "aborted and journaled by this call"
    assert answer_about(store, SAVE) == Answer.ABORTED.value
    assert NodeService(store).state_of(SAVE) == {"state": Answer.ABSENT.value}, (
        "the answer to nodes that do not settle the save"
    )


def test_a_rank_that_aborts_without_an_agent_journals_it(store: LocalStore) -> None:
    """A coordinator's rank that aborts without an agent journals the abort for a later agent."""
    open_save(store, SAVE, store.node_id())
    store.abort(SAVE)
    assert answer_about(store, SAVE) == Answer.ABORTED.value


def test_after_a_crash_before_the_entry_the_next_start_uses_the_intent(store: LocalStore) -> None:
    """After a crash between the abort and its entry, only the intent is left: the next start aborts the save, and
    journals it.
    """
    open_save(store, SAVE, store.node_id())
    with (
        mock.patch.object(store.journal, "append_end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        store.abort(SAVE)
    assert not store.is_staged(SAVE)
    (intent,) = store.list_staged()
    NodeService(store).abort(intent.save_id, "its ranks have ended")
    assert answer_about(store, SAVE) == Answer.ABORTED.value
    assert store.list_staged() == ()


@pytest.mark.parametrize("rule", ["beyond the newest 1", BY_HAND])
def test_a_removal_by_retention_is_journaled(store: LocalStore, rule: str) -> None:
    """Retention journals a removal as aborted, because a node that was away may still have the save staged.

    A removal by hand concerns this node only, and is answered as absent.
    """
    made = checkpointed([store], 1, {"__0_0.distcp": [0]})
    assert answer_about(store, made.save_id) == Answer.PUBLISHED.value
    collector = Collector(NodeService(store), threading.Event())
    if rule == BY_HAND:
        store.journal.append_end(made.save_id, End.REMOVING)
        collector.retire({}, (), (), in_doubt=False)
    else:
        removal = Removal(store.node_id(), made.checkpoint_id, made.save_id, rule)
        collector.carry_out(RetentionPlan(removals=(removal,)))
    assert store.catalog.checkpoint_of(made.save_id) is None
    assert answer_about(store, made.save_id) == (Answer.ABSENT if rule == BY_HAND else Answer.ABORTED).value


def test_only_the_coordinators_node_answers_aborted(store: LocalStore) -> None:
    """A node that did not coordinate a save answers `absent` after an abort, never `aborted`."""
    store.node_id()
    open_save(store, SAVE, ELSEWHERE)
    store.abort(SAVE)
    assert answer_about(store, SAVE) == Answer.ABSENT.value
    assert answer_about(store, ANOTHER) == Answer.ABSENT.value, "a save unknown to this node"


@pytest.mark.parametrize("manifest", [b"", b"damaged"])
def test_a_save_that_may_have_been_decided_is_not_reported_as_aborted(store: LocalStore, manifest: bytes) -> None:
    """A save with a damaged manifest may have been decided and published elsewhere: after its removal the answer is
    `absent`, not `aborted`.
    """
    open_save(store, SAVE, store.node_id())
    (store.staging(SAVE) / ".manifest.json").write_bytes(manifest)
    store.abort(SAVE)
    assert store.list_staged() == ()
    assert answer_about(store, SAVE) == Answer.ABSENT.value


@pytest.mark.parametrize("content", [b"", b"\xff", b"\0" * 80, f"{SAVE} abort\n{SAVE}".encode(), b"[" * 100_000])
def test_a_damaged_journal_counts_as_empty(store: LocalStore, content: bytes) -> None:
    """A damaged journal counts as empty, and new entries are written."""
    open_save(store, SAVE, store.node_id())
    store.abort(SAVE)
    (store.root / AGENT_DIR / "journal").write_bytes(content)
    assert answer_about(store, SAVE) == Answer.ABSENT.value
    open_save(store, ANOTHER, store.node_id())
    assert answer_about(store, ANOTHER) == Answer.ABORTED.value


def test_the_oldest_entries_are_dropped(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is bounded, in memory and on disk: it keeps the newest ends, each once."""
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


def test_an_ended_save_is_not_opened_again(store: LocalStore) -> None:
    """A rank's late request to open an aborted save is refused with the journaled reason, also after a restart."""
    for save_id, coordinator in ((SAVE, ELSEWHERE), (ANOTHER, store.node_id())):
        open_save(store, save_id, coordinator)
        NodeService(store).abort(save_id, "another save\novertook it")
        with pytest.raises(SaveAborted, match=r"another save.*overtook it"):
            NodeService(store).check_open(save_id)
        assert not store.is_staged(save_id)
    with pytest.raises(SaveAborted, match=r"another save.*overtook it"):
        NodeService(store).open_save(Intent(ANOTHER, "step-1", "s", overwrite=True, coordinator=store.node_id()))
    assert not store.is_staged(ANOTHER)


def test_an_entry_after_a_torn_one_counts(store: LocalStore) -> None:
    """An entry after a torn line counts, entries of other processes are seen, and a restored file is read from its
    start.
    """
    store.agent_directory()
    path, notes = store.root / AGENT_DIR / "journal", Journal(store.root)
    notes.append_end(SAVE, End.RETIRED)
    before = path.read_bytes()
    path.write_bytes(before + f"{ANOTHER} remov".encode())
    Journal(store.root).append_end(THIRD, End.REMOVING)
    assert [notes.find_end(each) for each in (ANOTHER, THIRD)] == [None, Entry(End.REMOVING)]
    path.write_bytes(before)
    assert [notes.find_end(each) for each in (SAVE, THIRD)] == [Entry(End.RETIRED), None]


def test_a_save_is_aborted_although_the_journal_cannot_be_written(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    """If the journal cannot be written, the save is still aborted. Other nodes then wait until all nodes answer."""
    open_save(store, SAVE, store.node_id())
    store.agent_directory()
    (store.root / AGENT_DIR / "journal").mkdir()
    store.abort(SAVE)
    assert store.list_staged() == ()
    assert "until all answer" in caplog.text
    assert answer_about(store, SAVE) == Answer.ABSENT.value
