"""Agents retire what the policy of a run keeps no longer: each its part, whole or not at all, and nobody brings it back."""

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
"""Some rounds of re-protection, woken."""


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


def tell(agent: RunningAgent, retention: Retention | None, *, revision: int, scope: str = "") -> None:
    tell_policies(agent, [Policy(scope, NODES, revision, retention).to_json()])


def stored(folder: Path, count: int, numbers: Sequence[int]) -> list[LocalStore]:
    """Stores with these checkpoints on all of them, two copies of each shard."""
    stores = [LocalStore(folder / f"node{index}") for index in range(count)]
    for number in numbers:
        checkpointed(stores, number, RING if count == 3 else PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL)
    return stores


def there(store: LocalStore) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in store.root.glob("step-*"))


def gone_to(stores: Sequence[LocalStore], numbers: Sequence[int]) -> None:
    """Waits until the stores hold these checkpoints alone and nothing is in the trash, and stay so."""
    wait_for(lambda: all(there(store) == list(numbers) for store in stores), 20, f"{numbers} alone")
    wait_for(lambda: not any(any((store.root / ".trash").glob("*")) for store in stores), 10, "an empty trash")


def stays(stores: Sequence[LocalStore], *running: RunningAgent) -> None:
    """Nothing changes in some rounds."""
    before = [there(store) for store in stores]
    until = time.monotonic() + SETTLED_S
    while time.monotonic() < until:
        meet(*running)
        time.sleep(0.3)
        assert [there(store) for store in stores] == before


def test_each_agent_retires_its_part_and_says_why(tmp_path: Path) -> None:
    """The newest two and every fourth stay, whole; the log has the rule of each that went."""
    stores = stored(tmp_path, 3, range(1, 8))
    with agents(stores) as running:
        stays(stores, *running)
        for agent in running:
            tell(agent, Retention(keep_last=2, keep_every=4), revision=7)
        gone_to(stores, [4, 6, 7])
        with running[0].client() as client:
            counted = partial(client.call, "GET", "/v1/status")  # a moment after the directory is gone
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
def test_a_node_that_was_away_retires_them_when_its_ranks_say_so(tmp_path: Path, how: int) -> None:
    """What its peers say has nothing removed there. What they retired meanwhile is not brought back, nor missed."""
    stores = stored(tmp_path, 3, (1, 2, 3))
    with agents(stores) as all_three:
        running = all_three[:2]
        all_three[2].signal(how)
        all_three[2].process.wait(10)
        for agent in running:
            tell(agent, Retention(keep_last=1), revision=3)
        gone_to(stores[:2], [3])
        checkpointed(stores, 4, RING, checkpoint_id="step-4", size_bytes=SMALL, on=(0, 1))
        meet(*running)
        gone_to(stores[:2], [4])
        with running_agent(stores[2].root, *QUICK) as back:
            meet(*running, back)
            wait_for(lambda: there(stores[2]) == [1, 2, 3, 4], 20, "the new one")
            stays(stores, *running, back)
            with back.client() as client:
                wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 20, "nothing to do")
            tell(back, Retention(keep_last=1), revision=4)
            gone_to(stores, [4])
            stays(stores, *running, back)
    assert [findings(store) for store in stores[:2]] == [[], []]
    assert "removed step-1" in (stores[2].root / "agent.out").read_text()


def test_nothing_goes_while_a_node_is_silent(tmp_path: Path) -> None:
    """It may know better; once it answers, or is aborted, the policy is carried out."""
    stores = stored(tmp_path, 3, (1, 2, 3))
    with agents(stores, *PATIENT) as running:
        running[2].signal(signal.SIGSTOP)
        for agent in running[:2]:
            tell(agent, Retention(keep_last=1), revision=3)
        until = time.monotonic() + 2 * SETTLED_S
        while time.monotonic() < until:
            time.sleep(0.2)
            assert there(stores[0]) == there(stores[1]) == [1, 2, 3]
        running[2].signal(signal.SIGCONT)
        tell(running[2], Retention(keep_last=1), revision=3)
        meet(*running)
        gone_to(stores, [3])
    stores = stored(tmp_path / "given-up", 3, (1, 2, 3))
    with agents(stores) as running:
        for agent in running:
            tell(agent, Retention(keep_last=3), revision=3)
        running[2].signal(signal.SIGKILL)
        for agent in running[:2]:
            tell(agent, Retention(keep_last=1), revision=4)
        gone_to(stores[:2], [3])


def test_the_newest_whole_one_stays_though_newer_ones_are_not(tmp_path: Path) -> None:
    """Of checkpoint 3 a shard is nowhere: it does not count, and the policy goes by what can be loaded."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    for store in stores:
        (store.root / "step-3" / shard(1)).unlink()
    with agents(stores) as running:
        for agent in running:
            tell(agent, Retention(keep_last=1), revision=3)
        gone_to(stores, [2, 3])
        stays(stores, *running)


def test_the_later_policy_holds_on_all_nodes(tmp_path: Path) -> None:
    """One node was left with the policy of an earlier run: what the others were told later keeps it from removing."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    with running_agent(stores[1].root, *QUICK) as other:
        tell(other, None, revision=9)
        with running_agent(stores[0].root, *QUICK) as agent:
            meet(agent, other)
            tell(agent, Retention(keep_last=1), revision=3)
            stays(stores, agent, other)
            tell(agent, Retention(keep_last=2), revision=10)
            gone_to(stores[:1], [2, 3])
            assert there(stores[1]) == [1, 2, 3]
            tell(other, Retention(keep_last=2), revision=10)
            gone_to(stores, [2, 3])


@pytest.mark.parametrize("gone_by", ["commit", "newer one seen whole", "retention"])
def test_a_part_of_another_runs_checkpoint_that_was_saved_over_does_not_come_back(tmp_path: Path, gone_by: str) -> None:
    """A node brings it that was away while the others dropped it, and retired what had replaced it: it goes there, too."""
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
            wait_for(lambda: not any(replaced_saves(store) for store in stores[:2]), 20, "the end of it")
        for agent in running:
            tell_policies(agent, policies)
        if gone_by == "retention":
            stays(stores[:2], *running)
            for agent in running:  # the reader has gone on to another checkpoint
                read_by(agent, {**load, "save_id": f"{3:032x}"})
        gone_to(stores[:2], [2, 3])
        assert not any(replaced_saves(store) for store in stores[:2])
        assert there(stores[2]) == [1, 2, 3]
    with agents(stores) as running:
        for agent in running:
            tell_policies(agent, policies)
        gone_to(stores, [2, 3])
        wait_for(lambda: not replaced_saves(stores[2]), 20, "the end of it there, too")
        stays(stores, *running)
    for store in stores:
        assert findings(store) == []


def test_what_a_load_reads_of_another_runs_version_has_its_name_no_more(tmp_path: Path) -> None:
    """What has replaced it stays, past its policy, until the load is over; then neither lies on any node."""
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
            tell_policies(agent, [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()])
        stays(stores, *running)
        assert held(stores[0]) == {shard(0), "__0_4.distcp"}, "both versions"
        for agent in running:  # the reader has gone on to another checkpoint
            read_by(agent, {**load, "save_id": f"{3:032x}"})
        gone_to(stores, [2, 3])
        assert not any(replaced_saves(store) for store in stores)
        stays(stores, *running)
    assert [findings(store) for store in stores] == [[], []]


def test_a_whole_checkpoint_with_which_a_node_was_away_gets_its_copies_again(tmp_path: Path) -> None:
    """Another run had overwritten it, and has retired that by now: it is the checkpoint of its name."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    checkpointed(stores, 9, {shard(0): (2, 0), shard(1): (2, 1)}, size_bytes=SMALL, lineage=OTHER)
    ours = {shard(0): (0,), shard(1): (0,)}
    checkpointed(stores, 1, ours, copies=1, size_bytes=SMALL, on=(0, 1), lineage=OURS)
    for number in (2, 3):
        checkpointed(stores, number, RING, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    with agents(stores[:2]) as running:
        for agent in running:
            tell_policies(agent, [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()])
        gone_to(stores[:2], [2, 3])
    with agents(stores):
        wait_for(lambda: [held(store) for store in stores[:2]] == [{shard(0)}, {shard(1)}], 20, "its copies again")
    assert [findings(store) for store in stores] == [[], [], []]


def read_by(agent: RunningAgent, load: Mapping[str, Any]) -> bool:
    with agent.peer() as client:
        return bool(client.call("POST", "/v1/sequence", load)["is_here"])


def tell_policies(agent: RunningAgent, policies: Sequence[Mapping[str, Any]]) -> None:
    with agent.client() as client:
        client.call("POST", "/v1/retention", {"policies": policies})


def test_a_peer_cannot_have_anything_removed(tmp_path: Path) -> None:
    """However late the policy that it says it has: a node removes for its own ranks only."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    with agents(stores) as (peer, agent):
        tell(peer, Retention(keep_last=1), revision=99)
        gone_to(stores[:1], [3])
        assert there(stores[1]) == [1, 2, 3]
        tell(agent, Retention(keep_last=2), revision=4)
        stays(stores, peer, agent)
        with agent.peer() as client, pytest.raises(StoreDenied, match="OWNER"):
            client.call("POST", "/v1/retention", {"policies": []})


def test_a_policy_survives_the_agent(tmp_path: Path) -> None:
    """After a restart the agent knows it, before any rank names it again."""
    (store,) = (LocalStore(tmp_path / "node0"),)
    for number in (1, 2):
        checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=f"run/step-{number}", size_bytes=SMALL)
    with running_agent(store.root, *QUICK) as agent:
        tell(agent, Retention(keep_last=2), revision=2, scope="run")
        stays([store], agent)
    for number in (3, 4):
        checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=f"run/step-{number}", size_bytes=SMALL)
    checkpointed([store], 5, {shard(0): (0,)}, checkpoint_id="other/step-5", size_bytes=SMALL)
    with running_agent(store.root, *QUICK):
        wait_for(lambda: sorted(p.name for p in (store.root / "run").iterdir()) == ["step-3", "step-4"], 20, "two")
    assert (store.root / "other" / "step-5" / ".metadata").exists()


def test_the_book_keeps_the_later_policy(tmp_path: Path) -> None:
    """With its revision, across restarts; an unreadable file is no policy, and so removes nothing."""
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


def test_a_damaged_policy_is_none(tmp_path: Path) -> None:
    """Whichever bit flips: no policy comes of it that keeps fewer checkpoints than the run wanted."""
    told = (Policy("run", NODES, 5, Retention(keep_last=9, keep_every=8)),)
    PolicyBook(tmp_path).learn(told)
    raw = (tmp_path / "retention.json").read_bytes()
    for position, bit in itertools.product(range(len(raw)), range(8)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        (tmp_path / "retention.json").write_bytes(damaged)
        assert PolicyBook(tmp_path).read_all() in ((), told), (position, bit)


def test_one_that_waits_for_its_upload_stays(tmp_path: Path) -> None:
    """On every node, until the bucket has it; then it goes, and is not brought back or uploaded again."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket"
    for number in (1, 2, 3):
        checkpointed(
            stores, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL, url=url if number == 1 else ""
        )
    with agents(stores) as running:
        for agent in running:
            tell(agent, Retention(keep_last=1), revision=3)
        gone_to(stores, [1, 3])
        stays(stores, *running)
        assert "kept beyond the policy" in (stores[0].root / "agent.out").read_text()
        for agent in running:
            with agent.client() as client:
                client.call("POST", "/v1/object/target", {"url": url, "options": {}, "environment": {}})
        wait_for((tmp_path / "bucket" / "step-1" / ".metadata").exists, 20, "the upload")
        gone_to(stores, [3])


def test_a_killed_agent_leaves_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the checkpoint is marked as gone and not removed: it is no checkpoint any more, and the rest goes."""
    stores = stored(tmp_path, 2, (1, 2))
    with ExitStack() as stack:
        first = stack.enter_context(running_agent(stores[0].root, *QUICK))
        monkeypatch.setenv(failpoints.ENV, "retire.gone=kill")
        second = stack.enter_context(running_agent(stores[1].root, *QUICK))
        monkeypatch.delenv(failpoints.ENV)
        meet(first, second)
        for agent in (first, second):
            tell(agent, Retention(keep_last=1), revision=2)
        assert second.process.wait(20) == -signal.SIGKILL
        assert [name for name, _ in stores[1].catalog.committed()] == ["step-2"]
        left = {path.name for path in (stores[1].root / "step-1").iterdir()}
        assert left == {shard(0), shard(1), ".metadata", gone_name(f"{1:032x}")}
        with running_agent(stores[1].root, *QUICK) as again:
            meet(first, again)
            gone_to(stores, [2])
            stays(stores, first, again)


def test_files_of_what_goes_wait_for_the_next_save(tmp_path: Path) -> None:
    """One checkpoint's shards, and as room in the status; once no policy removes anything, they go, too."""
    stores = stored(tmp_path, 2, (1, 2, 3))
    names = {"__0_0.recycled", "__1_0.recycled"}
    with agents(stores) as running:
        for agent in running:
            tell(agent, Retention(keep_last=1), revision=3)
        gone_to(stores, [3])
        for store in stores:
            assert {path.name for path in (store.root / RECYCLED_DIR).iterdir()} == names
        for agent in running:
            tell(agent, None, revision=4)
        wait_for(lambda: not any(any((store.root / RECYCLED_DIR).iterdir()) for store in stores), 20, "an empty pool")
        assert [there(store) for store in stores] == [[3], [3]]


@pytest.mark.parametrize("action", ["raise", "kept"])
def test_a_store_retires_in_one_step(tmp_path: Path, action: str) -> None:
    """Only the save that is meant; open files stay readable; what a crash leaves, the next start removes."""
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
        assert unclaimed == (), "a load does not take what is being removed for a checkpoint that may be newer"
        store.tidy(is_alone=True)
    else:
        assert retire(store.root, "step-1", later.save_id)
    assert there(store) == []
    assert not list((store.root / "step-1").glob("*"))
    with file:
        assert len(file.read()) == later.shards[name].size_bytes
    again = checkpointed([store], 1, {shard(0): (0,)}, size_bytes=SMALL)
    assert retire(store.root, "step-1", again.save_id)
