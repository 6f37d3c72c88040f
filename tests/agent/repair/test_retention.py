"""Agents remove checkpoints by the policy of a run: each node removes its own part, and the others do not restore it."""

import itertools
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import Retention, failpoints
from replicated_ckpt.core.layout import RECYCLED_DIR, gone_name
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.errors import StoreDenied
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.local.versions.remove import retire
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, replaced_saves, shard
from tests.marks import mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
QUICK = ("--lost-after-s", "1.5", "--away-after-s", "3600", "--round-every-s", "1")
PATIENT = (*QUICK, "--lost-after-s", "60")
RING = {shard(0): (0, 1), shard(1): (1, 2), shard(2): (2, 0)}
PAIR = {shard(0): (0, 1), shard(1): (1, 0)}
SMALL = 3000
OURS, OTHER = "a" * 16, "b" * 16
SETTLED_S = 1.5
"""Time for some rounds of re-protection."""


@contextmanager
def agents(of: Sequence[LocalStore], *options: str) -> Iterator[list[RunningAgent]]:
    with ExitStack() as stack:
        running = [stack.enter_context(running_agent(store.root, *(options or QUICK))) for store in of]
        meet(*running)
        yield running


def meet(*running: RunningAgent) -> None:
    for agent in running:
        with agent.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(*running), "session": "meeting"})


def set_policy(agent: RunningAgent, retention: Retention | None, *, revision: int, scope: str = "") -> None:
    set_policies(agent, [Policy(scope, NODES, revision, retention).to_json()])


def stored(folder: Path, count: int, numbers: Sequence[int]) -> list[LocalStore]:
    """Stores with these checkpoints on all of them, and two copies of each shard."""
    stores = [LocalStore(folder / f"node{index}") for index in range(count)]
    for number in numbers:
        checkpointed(stores, number, RING if count == 3 else PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL)
    return stores


def steps_in(store: LocalStore) -> list[int]:
    """The steps whose directories exist in a store."""
    return sorted(int(path.name.removeprefix("step-")) for path in store.root.glob("step-*"))


def wait_until_only(stores: Sequence[LocalStore], numbers: Sequence[int]) -> None:
    """Waits until the stores hold only these checkpoints, and the trash is empty."""
    wait_for(lambda: all(steps_in(store) == list(numbers) for store in stores), 20, f"{numbers} alone")
    wait_for(lambda: not any(any((store.root / ".trash").glob("*")) for store in stores), 10, "an empty trash")


def assert_unchanged(stores: Sequence[LocalStore], *running: RunningAgent) -> None:
    """Asserts that no checkpoint appears or disappears during some rounds."""
    before = [steps_in(store) for store in stores]
    until = time.monotonic() + SETTLED_S
    while time.monotonic() < until:
        meet(*running)
        time.sleep(0.3)
        assert [steps_in(store) for store in stores] == before


def test_each_agent_removes_its_part_and_logs_the_rule(tmp_path: Path) -> None:
    """The newest two and every fourth stay complete. The log has the rule for each removed checkpoint."""
    stores = stored(tmp_path, 3, range(1, 8))
    with agents(stores) as running:
        assert_unchanged(stores, *running)
        for agent in running:
            set_policy(agent, Retention(keep_last=2, keep_every=4), revision=7)
        wait_until_only(stores, [4, 6, 7])
        with running[0].client() as client:
            counted = partial(client.call, "GET", "/v1/status")  # counted a moment after the directory is removed
            wait_for(
                lambda: counted()["protection"]["retention"] == {"removed": 4, "slimmed": 0, "held_back": 0},
                20,
                "all four",
            )
    log = (stores[0].root / "agent.out").read_text()
    assert "removed step-5 (save" in log
    assert "its sequence 5 is below 6, the lowest of the newest 2 complete checkpoints, and not a multiple of 4" in log
    for store in stores:
        assert findings(store) == []
        assert held(store, "step-7")


@pytest.mark.parametrize("how", mark_long([signal.SIGTERM, signal.SIGKILL], keep=[signal.SIGKILL]))
def test_a_node_that_was_away_removes_only_by_its_own_ranks_policy(tmp_path: Path, how: int) -> None:
    """A node that was away removes nothing until its own ranks send the policy. The others do not restore what they
    removed meanwhile.
    """
    stores = stored(tmp_path, 3, (1, 2, 3))
    with agents(stores) as all_three:
        running = all_three[:2]
        all_three[2].signal(how)
        all_three[2].process.wait(10)
        for agent in running:
            set_policy(agent, Retention(keep_last=1), revision=3)
        wait_until_only(stores[:2], [3])
        checkpointed(stores, 4, RING, checkpoint_id="step-4", size_bytes=SMALL, on=(0, 1))
        meet(*running)
        wait_until_only(stores[:2], [4])
        with running_agent(stores[2].root, *QUICK) as back:
            meet(*running, back)
            wait_for(lambda: steps_in(stores[2]) == [1, 2, 3, 4], 20, "the new one")
            assert_unchanged(stores, *running, back)
            with back.client() as client:
                wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 20, "nothing to do")
            set_policy(back, Retention(keep_last=1), revision=4)
            wait_until_only(stores, [4])
            assert_unchanged(stores, *running, back)
    assert [findings(store) for store in stores[:2]] == [[], []]
    assert "removed step-1" in (stores[2].root / "agent.out").read_text()


def test_nothing_is_removed_while_a_node_is_silent(tmp_path: Path) -> None:
    """Nothing is removed until the silent node answers or counts as lost."""
    stores = stored(tmp_path, 3, (1, 2, 3))
    with agents(stores, *PATIENT) as running:
        running[2].signal(signal.SIGSTOP)
        for agent in running[:2]:
            set_policy(agent, Retention(keep_last=1), revision=3)
        until = time.monotonic() + 2 * SETTLED_S
        while time.monotonic() < until:
            time.sleep(0.2)
            assert steps_in(stores[0]) == steps_in(stores[1]) == [1, 2, 3]
        running[2].signal(signal.SIGCONT)
        set_policy(running[2], Retention(keep_last=1), revision=3)
        meet(*running)
        wait_until_only(stores, [3])
    stores = stored(tmp_path / "given-up", 3, (1, 2, 3))
    with agents(stores) as running:
        for agent in running:
            set_policy(agent, Retention(keep_last=3), revision=3)
        running[2].signal(signal.SIGKILL)
        for agent in running[:2]:
            set_policy(agent, Retention(keep_last=1), revision=4)
        wait_until_only(stores[:2], [3])


def test_the_newest_complete_checkpoint_stays(tmp_path: Path) -> None:
    """Checkpoint 3 has lost a shard: it does not count, so the newest complete one stays."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    for store in stores:
        (store.root / "step-3" / shard(1)).unlink()
    with agents(stores) as running:
        for agent in running:
            set_policy(agent, Retention(keep_last=1), revision=3)
        wait_until_only(stores, [2, 3])
        assert_unchanged(stores, *running)


def test_the_later_policy_holds_on_all_nodes(tmp_path: Path) -> None:
    """A node with an older policy removes nothing that a newer policy on another node keeps."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    with running_agent(stores[1].root, *QUICK) as other:
        set_policy(other, None, revision=9)
        with running_agent(stores[0].root, *QUICK) as agent:
            meet(agent, other)
            set_policy(agent, Retention(keep_last=1), revision=3)
            assert_unchanged(stores, agent, other)
            set_policy(agent, Retention(keep_last=2), revision=10)
            wait_until_only(stores[:1], [2, 3])
            assert steps_in(stores[1]) == [1, 2, 3]
            set_policy(other, Retention(keep_last=2), revision=10)
            wait_until_only(stores, [2, 3])


@pytest.mark.parametrize("gone_by", ["commit", "newer one seen whole", "retention"])
def test_a_part_of_an_overwritten_checkpoint_does_not_come_back(tmp_path: Path, gone_by: str) -> None:
    """A node comes back with a part of a checkpoint that another run overwrote. The other nodes have removed both
    saves: the part is removed, too.
    """
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    theirs = checkpointed(stores, 9, {shard(0): (0,)}, copies=1, size_bytes=SMALL, lineage=OTHER)
    ours = {shard(0): (0,)} if gone_by == "commit" else {shard(0): (0,), shard(1): (1,)}
    checkpointed(stores, 1, ours, copies=1, size_bytes=SMALL, lineage=OURS)
    for number in (2, 3):
        checkpointed(stores, number, RING, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    policies = [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()]
    with ExitStack() as stack:
        running = [stack.enter_context(running_agent(store.root, *QUICK)) for store in stores[:2]]
        load = {"lineage": "", "sequence": 3, "save_id": theirs.save_id, "reader": "session/1"}
        if gone_by == "retention":
            assert [read_by(agent, load) for agent in running] == [True, True]
        meet(*running)
        if gone_by == "newer one seen whole":
            wait_for(lambda: not any(replaced_saves(store) for store in stores[:2]), 20, "its removal")
        for agent in running:
            set_policies(agent, policies)
        if gone_by == "retention":
            assert_unchanged(stores[:2], *running)
            for agent in running:  # the reader has gone on to another checkpoint
                read_by(agent, {**load, "save_id": f"{3:032x}"})
        wait_until_only(stores[:2], [2, 3])
        assert not any(replaced_saves(store) for store in stores[:2])
        assert steps_in(stores[2]) == [1, 2, 3]
    with agents(stores) as running:
        for agent in running:
            set_policies(agent, policies)
        wait_until_only(stores, [2, 3])
        wait_for(lambda: not replaced_saves(stores[2]), 20, "its removal there")
        assert_unchanged(stores, *running)
    for store in stores:
        assert findings(store) == []


def test_an_overwritten_version_stays_until_its_load_ends(tmp_path: Path) -> None:
    """A load reads an overwritten version: that version and the one that replaced it stay until the load ends. Then
    both are removed.
    """
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    theirs = checkpointed(stores, 9, {shard(0): (0,)}, copies=1, size_bytes=SMALL, lineage=OTHER)
    checkpointed(stores, 1, {shard(0): (0,), shard(1): (1,)}, copies=1, size_bytes=SMALL, lineage=OURS)
    for number in (2, 3):
        checkpointed(stores, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    load = {"lineage": "", "sequence": 3, "save_id": theirs.save_id, "reader": "session/1"}
    with ExitStack() as stack:
        running = [stack.enter_context(running_agent(store.root, *QUICK)) for store in stores]
        assert [read_by(agent, load) for agent in running] == [True, True]
        meet(*running)
        for agent in running:
            set_policies(agent, [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()])
        assert_unchanged(stores, *running)
        assert held(stores[0]) == {shard(0), "__0_4.distcp"}, "both versions"
        for agent in running:  # the reader has gone on to another checkpoint
            read_by(agent, {**load, "save_id": f"{3:032x}"})
        wait_until_only(stores, [2, 3])
        assert not any(replaced_saves(store) for store in stores)
        assert_unchanged(stores, *running)
    assert [findings(store) for store in stores] == [[], []]


def test_a_complete_checkpoint_of_a_returning_node_gets_its_copies(tmp_path: Path) -> None:
    """Another run overwrote the checkpoint and has removed its own since: a returning node with the complete original
    restores its copies.
    """
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    checkpointed(stores, 9, {shard(0): (2, 0), shard(1): (2, 1)}, size_bytes=SMALL, lineage=OTHER)
    ours = {shard(0): (0,), shard(1): (0,)}
    checkpointed(stores, 1, ours, copies=1, size_bytes=SMALL, on=(0, 1), lineage=OURS)
    for number in (2, 3):
        checkpointed(stores, number, RING, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    with agents(stores[:2]) as running:
        for agent in running:
            set_policies(agent, [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()])
        wait_until_only(stores[:2], [2, 3])
    with agents(stores):
        wait_for(lambda: [held(store) for store in stores[:2]] == [{shard(0)}, {shard(1)}], 20, "its copies again")
    assert [findings(store) for store in stores] == [[], [], []]


def read_by(agent: RunningAgent, load: Mapping[str, Any]) -> bool:
    """Announces a load to an agent. Returns whether the node holds the save."""
    with agent.peer() as client:
        return bool(client.call("POST", "/v1/sequence", load)["is_here"])


def set_policies(agent: RunningAgent, policies: Sequence[Mapping[str, Any]]) -> None:
    with agent.client() as client:
        client.call("POST", "/v1/retention", {"policies": policies})


def test_a_peer_cannot_have_anything_removed(tmp_path: Path) -> None:
    """A node removes only by the policy of its own ranks, whatever revision a peer has."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    with agents(stores) as (peer, agent):
        set_policy(peer, Retention(keep_last=1), revision=99)
        wait_until_only(stores[:1], [3])
        assert steps_in(stores[1]) == [1, 2, 3]
        set_policy(agent, Retention(keep_last=2), revision=4)
        assert_unchanged(stores, peer, agent)
        with agent.peer() as client, pytest.raises(StoreDenied, match="OWNER"):
            client.call("POST", "/v1/retention", {"policies": []})


def test_a_policy_survives_the_agent(tmp_path: Path) -> None:
    """A restarted agent applies the policy before any rank sends it again."""
    (store,) = (LocalStore(tmp_path / "node0"),)
    for number in (1, 2):
        checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=f"run/step-{number}", size_bytes=SMALL)
    with running_agent(store.root, *QUICK) as agent:
        set_policy(agent, Retention(keep_last=2), revision=2, scope="run")
        assert_unchanged([store], agent)
    for number in (3, 4):
        checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=f"run/step-{number}", size_bytes=SMALL)
    checkpointed([store], 5, {shard(0): (0,)}, checkpoint_id="other/step-5", size_bytes=SMALL)
    with running_agent(store.root, *QUICK):
        wait_for(lambda: sorted(p.name for p in (store.root / "run").iterdir()) == ["step-3", "step-4"], 20, "two")
    assert (store.root / "other" / "step-5" / ".metadata").exists()


def test_the_book_keeps_the_later_policy(tmp_path: Path) -> None:
    """The higher revision wins, also after a restart. An unreadable file contains no policy, so nothing is removed."""
    one, two = Retention(keep_last=1), Retention(keep_last=2)
    book = PolicyBook(tmp_path)
    assert book.learn([Policy("", NODES, 5, one), Policy("run", "s3://b/x", 5, two)])
    assert not book.learn([Policy("", NODES, 7, one)])
    assert not book.learn([Policy("", NODES, 6, two)])
    again = PolicyBook(tmp_path)
    assert again.of("", NODES, "") == Policy("", NODES, 7, one)
    assert again.of("run", "s3://b/x", "") == Policy("run", "s3://b/x", 5, two)
    assert again.of("run", NODES, "") is None
    assert again.learn([Policy("", NODES, 7, two)])
    assert again.of("", NODES, "") == Policy("", NODES, 7, None)
    for raw in (b"", b"[{}]", b'{"a": 1}', b"[[]]", b"\xff"):
        (tmp_path / "retention.json").write_bytes(raw)
        assert PolicyBook(tmp_path).read_all() == ()


def test_a_damaged_policy_is_ignored(tmp_path: Path) -> None:
    """Any flipped bit makes the file invalid, and never a policy that keeps fewer checkpoints."""
    policies_before = (Policy("run", NODES, 5, Retention(keep_last=9, keep_every=8)),)
    PolicyBook(tmp_path).learn(policies_before)
    raw = (tmp_path / "retention.json").read_bytes()
    for position, bit in itertools.product(range(len(raw)), range(8)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        (tmp_path / "retention.json").write_bytes(damaged)
        assert PolicyBook(tmp_path).read_all() in ((), policies_before), (position, bit)


def test_a_checkpoint_that_waits_for_its_upload_stays(tmp_path: Path) -> None:
    """A checkpoint stays on every node until it is in the bucket. After that it is removed, and neither restored nor
    uploaded again.
    """
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket"
    for number in (1, 2, 3):
        checkpointed(
            stores, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL, url=url if number == 1 else ""
        )
    with agents(stores) as running:
        for agent in running:
            set_policy(agent, Retention(keep_last=1), revision=3)
        wait_until_only(stores, [1, 3])
        assert_unchanged(stores, *running)
        assert "kept beyond the policy" in (stores[0].root / "agent.out").read_text()
        for agent in running:
            with agent.client() as client:
                client.call("POST", "/v1/object/target", {"url": url, "options": {}, "environment": {}})
        wait_for((tmp_path / "bucket" / "step-1" / ".metadata").exists, 20, "the upload")
        wait_until_only(stores, [3])


def test_a_killed_agent_leaves_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is killed after it marked a checkpoint as removed: it counts as removed, and the next agent removes the
    files.
    """
    stores = stored(tmp_path, 2, (1, 2))
    with ExitStack() as stack:
        first = stack.enter_context(running_agent(stores[0].root, *QUICK))
        monkeypatch.setenv(failpoints.ENV, "retire.gone=kill")
        second = stack.enter_context(running_agent(stores[1].root, *QUICK))
        monkeypatch.delenv(failpoints.ENV)
        meet(first, second)
        for agent in (first, second):
            set_policy(agent, Retention(keep_last=1), revision=2)
        assert second.process.wait(20) == -signal.SIGKILL
        assert [name for name, _ in stores[1].catalog.committed()] == ["step-2"]
        left = {path.name for path in (stores[1].root / "step-1").iterdir()}
        assert left == {shard(0), shard(1), ".metadata", gone_name(f"{1:032x}")}
        with running_agent(stores[1].root, *QUICK) as again:
            meet(first, again)
            wait_until_only(stores, [2])
            assert_unchanged(stores, first, again)


def test_files_of_a_removed_checkpoint_are_recycled(tmp_path: Path) -> None:
    """The files of one removed checkpoint are recycled. Without a policy that removes, the pool is emptied."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    names = {"__0_0.recycled", "__1_0.recycled"}
    with agents(stores) as running:
        for agent in running:
            set_policy(agent, Retention(keep_last=1), revision=3)
        wait_until_only(stores, [3])
        for store in stores:
            assert {path.name for path in (store.root / RECYCLED_DIR).iterdir()} == names
        for agent in running:
            set_policy(agent, None, revision=4)
        wait_for(lambda: not any(any((store.root / RECYCLED_DIR).iterdir()) for store in stores), 20, "an empty pool")
        assert [steps_in(store) for store in stores] == [[3], [3]]


@pytest.mark.parametrize("action", ["raise", "kept"])
def test_a_checkpoint_is_removed_in_one_step(tmp_path: Path, action: str) -> None:
    """Only the given save is removed, open files stay readable, and the next start completes a removal that crashed."""
    (store,) = stored(tmp_path, 1, ())
    manifest = checkpointed([store], 1, {shard(0): (0,)}, size_bytes=SMALL)
    later = checkpointed([store], 2, {shard(0): (0,)}, size_bytes=SMALL)
    assert not retire(store.root, "step-1", manifest.save_id)
    assert not retire(store.root, "step-9", manifest.save_id)
    (store.root / "step-1").rename(store.root / "best")
    assert not retire(store.root, "best", later.save_id)
    (store.root / "best").rename(store.root / "step-1")
    (name,) = later.shards
    file = (store.root / "step-1" / name).open("rb")
    if action == "raise":
        with (
            failpoints.arm("retire.gone", failpoints._action("raise")),
            pytest.raises(failpoints.FailpointReached),
        ):
            retire(store.root, "step-1", later.save_id)
        assert store.catalog.look("step-1").gone == (later.save_id,)
        unclaimed = UnclaimedFilesReader(store, store.node_id()).find_files()
        assert unclaimed == (), "files that are being removed are not unclaimed files"
        store.tidy(is_alone=True)
    else:
        assert retire(store.root, "step-1", later.save_id)
    assert steps_in(store) == []
    assert not list((store.root / "step-1").glob("*"))
    with file:
        assert len(file.read()) == later.shards[name].size_bytes
    again = checkpointed([store], 1, {shard(0): (0,)}, size_bytes=SMALL)
    assert retire(store.root, "step-1", again.save_id)
