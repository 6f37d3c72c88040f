"""The marks of a node (rejections, restore counts): restarts, a full disk, and false marks of peers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.core.upkeep.marks import NO_MARKS, REJECTIONS_MAX, RUNS_MAX, Marks
from replicated_ckpt.errors import ConfigInvalid, StoreDenied, StoreError, StoreFull
from replicated_ckpt.node.peers.watch import ask_holdings
from replicated_ckpt.node.state import state_file
from replicated_ckpt.node.state.mark_book import NAME, MarkBook
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import RunningAgent, peers_of, running_agent
from tests.agent.checkpoints import checkpointed
from tests.agent.repair.test_reprotect import PAIR, stores

RUN, SAVE, OTHER = "1" * 16, "a" * 32, "b" * 32


def test_marks_outlive_the_agent(tmp_path: Path) -> None:
    """A restarted agent reads rejections and counts. A file with a wrong checksum is read as empty."""
    book = MarkBook(tmp_path)
    book.reject([SAVE, OTHER], NO_MARKS, is_rejected=True)
    book.reject([OTHER, "c" * 32], NO_MARKS, is_rejected=False)
    for count in (1, 2):
        book.note_restores(RUN, 7, SAVE, count)
    found = MarkBook(tmp_path).read()
    assert found == book.read()
    assert (found.is_rejected(SAVE), found.is_rejected(OTHER)) == (True, False)
    assert found.count_restores(RUN, 7, SAVE) == 2
    path = tmp_path / NAME
    path.write_text(path.read_text().replace(SAVE, OTHER))
    assert MarkBook(tmp_path).read() == NO_MARKS


def test_a_new_mark_outranks_the_marks_of_other_nodes(tmp_path: Path) -> None:
    """A new mark gets a number above the numbers of all other nodes. A number near the limit is refused as false."""
    book = MarkBook(tmp_path)
    book.reject([SAVE], Marks({SAVE: 8}), is_rejected=True)
    assert book.read().rejections == {SAVE: 9}
    with pytest.raises(ConfigInvalid, match="sends a false one"):
        book.reject([SAVE], Marks({SAVE: 1 << 53}), is_rejected=True)
    book.learn([Marks({SAVE: 1 << 53})], {SAVE})
    assert book.read().rejections == {SAVE: 9}
    book.reject([SAVE], NO_MARKS, is_rejected=False)
    assert book.read().rejections == {SAVE: 10}


def test_a_full_disk_fails_only_the_users_rejection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, counts and marks of peers are kept in memory until the agent ends. The user's rejection fails,
    and is not kept.
    """

    def refuse(*_: object) -> None:
        raise StoreFull("disk", "write", NAME, "no space left")

    book = MarkBook(tmp_path)
    monkeypatch.setattr(state_file, "write_file", refuse)
    book.note_restores(RUN, 7, SAVE, 1)
    book.learn([Marks({SAVE: 1})], {SAVE})
    with pytest.raises(StoreError):
        book.reject([OTHER], NO_MARKS, is_rejected=True)
    assert book.read().rejections == {SAVE: 1}
    assert book.read().count_restores(RUN, 7, SAVE) == 1


def test_marks_of_peers_have_a_limit(tmp_path: Path) -> None:
    """Marks of unknown saves are dropped. A full book refuses marks of peers, and still takes the user's."""
    book, saves = MarkBook(tmp_path), [f"{number:032x}" for number in range(REJECTIONS_MAX + 9)]
    book.learn([Marks(dict.fromkeys(saves, 1))], {SAVE})
    assert book.read() == NO_MARKS
    book.learn([Marks(dict.fromkeys(saves, 1))], dict.fromkeys(saves))
    assert len(book.read().rejections) == REJECTIONS_MAX
    book.learn([Marks({SAVE: 1})], {SAVE})
    assert not book.read().is_rejected(SAVE)
    book.reject([SAVE], NO_MARKS, is_rejected=True)
    assert book.read().is_rejected(SAVE)
    for number in range(RUNS_MAX + 9):
        book.note_restores(f"{number:016x}", 1, SAVE, 1 << 40)
    assert len(MarkBook(tmp_path).read().restores) == RUNS_MAX
    assert len(MarkBook(tmp_path).read().rejections) == REJECTIONS_MAX


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[list[RunningAgent], str]]:
    """Two agents that know each other, and the id of a save that both hold."""
    nodes: list[LocalStore] = stores(tmp_path, 2)
    save_id = checkpointed(nodes, 7, PAIR, size_bytes=3000).save_id
    with running_agent(nodes[0].root) as one, running_agent(nodes[1].root) as other:
        for agent in (one, other):
            with agent.client() as client:
                client.call("POST", "/v1/peers", {"peers": peers_of(one, other), "session": "s"})
        yield [one, other], save_id


def is_rejected(agent: RunningAgent, save_id: str) -> bool:
    return ask_holdings(agent.endpoint.address()).node_report.marks.is_rejected(save_id)


def test_a_peer_cannot_set_marks(pair: tuple[list[RunningAgent], str]) -> None:
    """A peer's token cannot reject a save. A peer can only name a node of the address book, whose marks this node then
    fetches.
    """
    (one, other), save_id = pair
    with one.peer() as peer:
        with pytest.raises(StoreDenied, match="OWNER"):
            peer.call("POST", "/v1/reject", {"save_ids": [save_id], "is_rejected": True})
        forged = {"rejections": {save_id: 1}, "restores": {}}
        peer.call("POST", "/v1/marks", {"node_id": other.endpoint.node_id, "marks": forged, **forged})
        with pytest.raises(ConfigInvalid, match="not in this node's address book"):
            peer.call("POST", "/v1/marks", {"node_id": "stranger"})
    assert not is_rejected(one, save_id)


def test_the_users_mark_is_on_both_nodes_at_once(pair: tuple[list[RunningAgent], str]) -> None:
    """A rejection is set on one node and ended on the other: each answer lists the nodes that have it, and the older
    mark does not return.
    """
    agents, save_id = pair
    for setter, rejected in ((0, True), (1, False), (1, True), (0, False)):
        agent, peer = agents[setter], agents[1 - setter]
        with agent.client() as client:
            answer = client.call("POST", "/v1/reject", {"save_ids": [save_id], "is_rejected": rejected})
        assert (answer["reached"], answer["not_reached"]) == ([peer.endpoint.node_id], {})
        assert [is_rejected(each, save_id) for each in agents] == [rejected] * 2
    path = agents[0].root / ".agent" / NAME
    assert json.loads(path.read_text())["marks"]["rejections"] == {save_id: 4}


def test_a_rejection_must_name_saves(pair: tuple[list[RunningAgent], str]) -> None:
    """A request with no save id, or with an invalid one, marks nothing."""
    (agent, _), _ = pair
    with agent.client() as client:
        for save_ids in ([], ["../x"], [SAVE, "step-1"]):
            with pytest.raises(ConfigInvalid, match="names no saves"):
                client.call("POST", "/v1/reject", {"save_ids": save_ids, "is_rejected": True})
    assert not (agent.root / ".agent" / NAME).exists()
