"""`rm` and `prune` remove for good on the user's own node. Other nodes learn of the removal, and keep what they have."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.node.saves.collector import Collector
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.stores.local.directories import journal
from replicated_ckpt.stores.local.directories.journal import End, Journal
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from replicated_ckpt.stores.local.versions.remove import retire
from tests.agent.agents import peers_of, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, shard
from tests.agent.repair.test_reprotect import PAIR, agents, stores
from tests.agent.repair.test_retention import assert_unchanged, meet, set_policy, steps_in
from tests.cli.commands import as_json, command
from tests.stores.local.test_order_of_commits import open_save

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]
SMALL, MANY = 3000, 20
OTHER_SAVE = "f" * 32
QUICK = ("--lost-after-s", "1.5", "--round-every-s", "1")


def saved(nodes: Sequence[LocalStore], numbers: Sequence[int]) -> list[str]:
    return [
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL).save_id
        for number in numbers
    ]


def saved_alone(store: LocalStore) -> list[str]:
    """Two checkpoints that no other node holds."""
    return [
        checkpointed(
            [store], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}", copies=1, size_bytes=SMALL
        ).save_id
        for number in (1, 2)
    ]


def names_in(store: LocalStore) -> list[str]:
    return sorted(path.name for path in store.root.glob("step-*"))


def test_rm_on_each_node_removes_for_good(tmp_path: Path) -> None:
    """The output names the node that still has the checkpoint. A removed checkpoint does not come back, also after a
    restart.
    """
    nodes = stores(tmp_path, 2)
    saved(nodes, (1, 2))
    with agents(nodes, *QUICK) as running:
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED
        assert "removed on this node: step-1 (" in done.stdout
        assert f"still on host1 (node {nodes[1].node_id()}): step-1" in done.stdout
        assert "next step: run the same command on each of these nodes" in done.stdout
        assert [steps_in(store) for store in nodes] == [[2], [1, 2]]
        assert_unchanged(nodes, *running)
        assert "removed on host0" in command("ls", "--root", nodes[1].root).stdout
        assert command("status", "--root", nodes[1].root).returncode == ExitCode.OK
        assert command("verify", "--root", nodes[1].root).returncode == ExitCode.OK
        running[0].signal(signal.SIGKILL)
        running[0].process.wait()
        with running_agent(nodes[0].root, *QUICK) as again:
            meet(again, running[1])
            assert_unchanged(nodes, again, running[1])
            done = command("rm", "step-1", "--root", nodes[1].root)
            assert (done.returncode, done.stderr) == (ExitCode.OK, "")
            assert [steps_in(store) for store in nodes] == [[2], [2]]
            assert_unchanged(nodes, again, running[1])
            assert command("rm", "step-1", "--root", nodes[1].root).returncode == ExitCode.NOT_FOUND
    assert [findings(store) for store in nodes] == [[], []]


def test_the_last_complete_checkpoint_is_kept(tmp_path: Path) -> None:
    """Without --force the last complete checkpoint stays. A newer one with a lost file does not count."""
    nodes = stores(tmp_path, 2)
    saved(nodes, (1, 2))
    for store in nodes:
        (store.root / "step-2" / shard(0)).unlink()
    with agents(nodes, *QUICK):
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert (done.returncode, steps_in(nodes[0])) == (ExitCode.FAILED, [1, 2])
        assert "step-1 is the last good checkpoint of its run; nothing was changed" in done.stdout
        assert command("rm", "step-2", "--root", nodes[0].root, "--dry-run").returncode == ExitCode.OK
        assert steps_in(nodes[0]) == [1, 2]
        assert "still on" in command("rm", "step-2", "--root", nodes[0].root).stdout
        assert steps_in(nodes[0]) == [1]
        code, found = as_json("rm", "step-1", "--root", nodes[0].root, "--force")
        assert (code, found["removed"], steps_in(nodes[0])) == (ExitCode.FAILED, ["step-1"], [])
        assert steps_in(nodes[1]) == [1, 2]


def test_a_checkpoint_that_a_load_reads_stays(tmp_path: Path) -> None:
    """A checkpoint that a load reads is kept, and no removal is recorded. --force removes it."""
    store = LocalStore(tmp_path / "node0")
    first, _ = saved_alone(store)
    with running_agent(store.root) as agent:
        with agent.client() as client:
            client.call("POST", "/v1/sequence", {"lineage": "", "sequence": 1, "save_id": first, "reader": "a load"})
        done = command("rm", "step-1", "--root", store.root)
        assert (done.returncode, steps_in(store)) == (ExitCode.FAILED, [1, 2])
        assert "kept: step-1: a load reads it" in done.stdout
        assert "--force" in done.stdout
        assert store.journal.read_removed() == frozenset()
        assert command("rm", "step-1", "--root", store.root, "--force").returncode == ExitCode.OK
        assert steps_in(store) == [2]


def test_an_interrupted_removal_is_finished(tmp_path: Path) -> None:
    """The agent died between the journal entry and the removal: the next agent removes this checkpoint only."""
    store = LocalStore(tmp_path / "node0")
    first, _ = saved_alone(store)
    store.agent_directory()
    store.journal.append_end(first, End.REMOVING)
    with running_agent(store.root):
        wait_for(lambda: steps_in(store) == [2], 20, "the removal")
    assert findings(store) == []


def test_prune_removes_by_the_rule(tmp_path: Path) -> None:
    """A dry run prints the plan and changes nothing. Run on both nodes, `prune` leaves the newest two, complete."""
    nodes = stores(tmp_path, 2)
    saved(nodes, (1, 2, 3, 4))
    with agents(nodes, *QUICK) as running:
        done = command("prune", "--keep-last", "2", "--root", nodes[0].root, "--dry-run")
        assert (done.returncode, done.stdout.count(" goes: "), done.stdout.count(" stays: ")) == (0, 2, 2)
        assert steps_in(nodes[0]) == [1, 2, 3, 4]
        assert command("prune", "--keep-last", "2", "--root", nodes[0].root).returncode == ExitCode.FAILED
        assert [steps_in(store) for store in nodes] == [[3, 4], [1, 2, 3, 4]]
        assert_unchanged(nodes, *running)
        code, found = as_json("prune", "--keep-last", "2", "--root", nodes[1].root)
        assert (code, found["removed"], found["still_on"]) == (ExitCode.OK, ["step-1", "step-2"], {})
        assert [steps_in(store) for store in nodes] == [[3, 4], [3, 4]]
        assert "nothing to remove" in command("prune", "--keep-last", "2", "--root", nodes[1].root).stdout
        for wrong in ("0", "-1", "all"):
            done = command("prune", f"--keep-last={wrong}", "--root", nodes[1].root)
            assert (done.returncode, f"--keep-last: must be a whole number from 1, not '{wrong}'" in done.stderr) == (
                2,
                True,
            )
    assert [findings(store) for store in nodes] == [[], []]


def test_a_silent_node_is_named(tmp_path: Path) -> None:
    """The exit code is 5, and the output names the silent node. When that node is back, nothing is copied from it."""
    nodes = stores(tmp_path, 2)
    saved(nodes, (1, 2))
    with agents(nodes, "--lost-after-s", "600") as running:
        running[1].signal(signal.SIGSTOP)
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert done.returncode == ExitCode.UNREACHABLE, done.stdout
        assert f"host1 (node {nodes[1].node_id()}) was not reached (if it never comes back: " in done.stdout
        running[1].signal(signal.SIGCONT)
        with running[0].client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(*running), "session": "again"})
        time.sleep(1)
        assert_unchanged(nodes, *running)
        assert [steps_in(store) for store in nodes] == [[2], [1, 2]]


def test_a_removal_leaves_the_copies_of_a_spare_node(tmp_path: Path) -> None:
    """A removal on one node does not remove the copies that a spare node made."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes[:2], 1, PAIR, checkpoint_id="step-1", size_bytes=SMALL)
    checkpointed(nodes[:2], 2, PAIR, checkpoint_id="step-2", size_bytes=SMALL)
    with agents(nodes, *QUICK) as running:
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        spare = nodes[2]
        wait_for(lambda: held(spare, "step-1") == held(spare, "step-2") == {shard(0), shard(1)}, 30, "the copies")
        assert command("rm", "step-1", "--root", nodes[0].root).returncode == ExitCode.FAILED
        assert steps_in(nodes[0]) == [2]
        assert_unchanged([nodes[0], spare], running[0], running[2])
        assert held(spare, "step-1") == {shard(0), shard(1)}


def test_a_checkpoint_that_the_user_restores_stays(tmp_path: Path) -> None:
    """A removed checkpoint is restored from a backup under the same save id: it stays, and is protected again."""
    nodes = stores(tmp_path, 2)
    saved(nodes, (1, 2))
    for store in nodes:
        shutil.copytree(store.root / "step-1", tmp_path / "backup" / store.root.name)
    with agents(nodes, *QUICK) as running:
        for store in nodes:
            command("rm", "step-1", "--root", store.root)
        assert [steps_in(store) for store in nodes] == [[2], [2]]
        for store in nodes:
            shutil.copytree(tmp_path / "backup" / store.root.name, tmp_path / "coming" / store.root.name)
            (tmp_path / "coming" / store.root.name).rename(store.root / "step-1")
        (nodes[0].root / "step-1" / shard(1)).unlink()
        meet(*running)
        wait_for(lambda: held(nodes[0], "step-1") == {shard(0), shard(1)}, 30, "the copy of the restored checkpoint")
        assert_unchanged(nodes, *running)
        assert [steps_in(store) for store in nodes] == [[1, 2], [1, 2]]
    assert [findings(store) for store in nodes] == [[], []]


def test_a_removal_ends_once_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal is pending until its files are gone. Peers are informed for longer, also after a restart."""
    monkeypatch.setattr(journal, "REMOVALS_MAX", MANY)
    LocalStore(tmp_path).agent_directory()
    book = Journal(tmp_path)
    first, second = (f"{number:032x}" for number in (1, 2))
    for save_id in (first, second):
        book.append_end(save_id, End.REMOVING)
    book.append_end(first, End.REMOVED, after=End.REMOVING)
    for again in (book, Journal(tmp_path)):
        assert again.read_removals() == (frozenset({second}), frozenset({first}))
        assert again.read_removed() == {first, second}
    for save_id in (first, second):
        book.append_end(save_id, End.RESTORED, after=End.REMOVED)
    assert Journal(tmp_path).read_removals() == (frozenset({second}), frozenset())
    for number in range(MANY + 5):
        book.append_end(f"{number + 3:032x}", End.REMOVING)
    newest = {f"{number + 3:032x}" for number in range(5, MANY + 5)}
    assert book.read_removed() == book.read_removals()[0] == newest


def test_a_removal_during_a_look_stays_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal proceeds while the collector looks for its files: it stays recorded, or peers would restore the save."""
    store = LocalStore(tmp_path / "a")
    save_id = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=SMALL).save_id
    service = NodeService(store)
    book, find_here = service.store.journal, Collector._find_here
    looks = iter((None, partial(book.append_end, end=End.REMOVING)))

    def move_on(read: Callable[[Journal], Any]) -> Callable[[Journal], Any]:
        """Advances the removal by one step before the journal is read the second time."""

        def reading(self: Journal) -> Any:
            step = next(looks, None)
            if step is not None:
                step(save_id)
            return read(self)

        return reading

    def scan(self: Collector) -> Mapping[str, str]:
        for step in filter(None, looks):
            step(save_id)
        found = find_here(self)
        assert retire(store.root, "step-1", save_id)
        book.append_end(save_id, End.REMOVED)
        return found

    book.append_end(OTHER_SAVE, End.REMOVING)  # without a pending removal the collector does not look
    for name in ("read_removed", "read_removals"):
        monkeypatch.setattr(Journal, name, move_on(getattr(Journal, name)))
    monkeypatch.setattr(Collector, "_find_here", scan)
    Collector(service, threading.Event())._finish_removals()
    assert save_id in Journal(store.root).read_removed()


def test_a_checkpoint_that_a_process_reads_is_kept(tmp_path: Path) -> None:
    """The agent refuses before anything is removed. With --force, the checkpoint is removed when the process ends."""
    store = LocalStore(tmp_path / "node0")
    saves = [
        checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}", copies=1, size_bytes=SMALL)
        for number in (1, 2)
    ]
    with running_agent(store.root, *QUICK):
        lock = lock_version(store.catalog, "step-1", saves[0].save_id)
        assert lock is not None
        try:
            code, found = as_json("rm", "step-1", "--root", store.root)
            assert (code, found["removed"], steps_in(store)) == (ExitCode.FAILED, [], [1, 2])
            assert found["kept"] == {"step-1": "a process of this node reads it; wait for it to end, or use --force"}
            assert store.journal.read_removed() == frozenset()
            done = command("rm", "step-1", "--root", store.root, "--force")
            assert (done.returncode, steps_in(store)) == (ExitCode.FAILED, [1, 2])
            assert (
                "kept: step-1: a process of this node reads it; it is removed when that process has ended"
                in done.stdout
            )
            assert "removed on this node" not in done.stdout
        finally:
            lock.release()
        wait_for(lambda: steps_in(store) == [2], 20, "the removal")


def test_a_version_stays_with_an_older_one_that_a_process_reads(tmp_path: Path) -> None:
    """Without the newer version, the older one would get its name back. The other checkpoints are removed."""
    store = LocalStore(tmp_path / "node0")
    old = open_save(store, 1, checkpoint_id="step-1")
    store.commit(old.save_id)
    newer = open_save(store, 2, checkpoint_id="step-1", is_whole=False)  # incomplete, so the old version is kept
    store.commit(newer.save_id)
    store.commit(open_save(store, 3, checkpoint_id="step-2").save_id)
    with running_agent(store.root, *QUICK):
        lock = lock_version(store.catalog, "step-1", old.save_id)
        assert lock is not None
        try:
            for force in ([], ["--force"]):
                code, found = as_json("rm", "step-1", "--root", store.root, *force)
                assert (code, found["removed"]) == (ExitCode.FAILED, [])
                assert found["kept"].keys() == {"step-1"}
                assert store.catalog.save_id_of("step-1") == newer.save_id
        finally:
            lock.release()
        code, found = as_json("rm", "step-1", "--root", store.root)
        assert (code, found["kept"]) == (ExitCode.OK, {})
        assert names_in(store) == ["step-2"]
    assert findings(store) == []


def test_a_staged_save_is_removed_once_it_is_published(tmp_path: Path) -> None:
    """`rm` of a save that is still staged here: the save is removed once it is published."""
    store = LocalStore(tmp_path / "node0")
    with running_agent(store.root) as agent, agent.client() as client:
        staged = open_save(store, 1, checkpoint_id="step-1")
        lock = store.lock_save(staged.save_id)  # as a rank that writes
        answer = client.call("POST", "/v1/remove", {"checkpoint_id": "step-1", "save_id": staged.save_id})
        assert answer["why"] == "its save has not ended on this node; it is removed when the save has ended"
    service = NodeService(store)
    Collector(service, threading.Event())._finish_removals()
    store.commit(staged.save_id)
    lock.release()
    assert names_in(store) == ["step-1"]
    Collector(service, threading.Event())._finish_removals()
    assert names_in(store) == []
    assert store.journal.read_removals() == (frozenset(), frozenset({staged.save_id}))
    assert findings(store) == []


def test_a_second_rm_removes_nothing(tmp_path: Path) -> None:
    """A second `rm` on the same node says that the checkpoint is not here, and which node still has it."""
    nodes = stores(tmp_path, 2)
    saved(nodes, (1, 2))
    with agents(nodes, *QUICK):
        assert "removed on this node: step-1 (" in command("rm", "step-1", "--root", nodes[0].root).stdout
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED
        assert "removed on this node" not in done.stdout
        assert "not on this node, and not copied here again: step-1" in done.stdout
        assert f"still on host1 (node {nodes[1].node_id()}): step-1" in done.stdout


def test_one_nodes_removal_hides_no_lost_file(tmp_path: Path) -> None:
    """`status`, `show` and `verify` exit with 4 until each node has removed the checkpoint."""
    nodes = stores(tmp_path, 3)
    layout = {shard(0): (0, 1), shard(1): (1, 2)}
    for number in (1, 2):
        checkpointed(nodes, number, layout, checkpoint_id=f"step-{number}", size_bytes=SMALL)
    for store in nodes[1:]:
        (store.root / "step-1" / shard(1)).unlink()
    with agents(nodes, *QUICK):
        assert command("rm", "step-1", "--root", nodes[0].root).returncode == ExitCode.FAILED
        done = command("status", "--root", nodes[1].root)
        assert done.returncode == ExitCode.SHARD_LOST, done.stdout
        assert "files are lost: step-1: 1 file lost; removed on host0" in done.stdout
        assert command("show", "step-1", "--root", nodes[1].root).returncode == ExitCode.SHARD_LOST
        done = command("verify", "--root", nodes[1].root)
        assert done.returncode == ExitCode.SHARD_LOST, done.stdout
        assert f"lost: step-1/{shard(1)}" in done.stdout
        assert command("rm", "step-1", "--root", nodes[1].root).returncode == ExitCode.FAILED
        assert command("rm", "step-1", "--root", nodes[2].root).returncode == ExitCode.OK
        assert command("verify", "--root", nodes[1].root).returncode == ExitCode.OK


@pytest.mark.parametrize("verb", [("drain",), ("rm", "step-1"), ("prune", "--keep-last", "1")])
def test_a_dry_run_starts_no_agent_and_changes_nothing(tmp_path: Path, verb: tuple[str, ...]) -> None:
    """The plan is that of a real run: it respects the run's policy and open uploads."""
    store = LocalStore(tmp_path / "node")
    saved_alone(store)
    for number, url in ((3, "file:///nowhere/bucket"), (4, "")):
        checkpointed(
            [store], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}", copies=1, size_bytes=SMALL, url=url
        )
    PolicyBook(store.agent_directory()).learn([Policy("", NODES, 1, Retention(keep_last=1, keep_every=2))])
    before = sorted(store.root.rglob("*"))
    done = command(*verb, "--dry-run", "--root", store.root)
    assert sorted(store.root.rglob("*")) == before
    expected = {
        "drain": "not drained: no agent runs here, so open uploads are unknown",
        "rm": "would remove step-1 (save ",
        "prune": " goes: ",
    }
    assert expected[verb[0]] in done.stdout, done.stderr
    if verb[0] == "prune":
        assert [line.split()[0] for line in done.stdout.splitlines() if " goes: " in line] == ["step-1"]
        assert findings(store) == []


def test_prune_keeps_what_the_runs_own_policy_keeps(tmp_path: Path) -> None:
    """The best checkpoint by the metric and each `keep_every` stay beside the newest, and the output has the rule."""
    store = LocalStore(tmp_path / "node0")
    for number, loss in enumerate((0.5, 0.1, 0.4, 0.3, 0.2), 1):
        layout = {shard(0): (0,)}
        saved = checkpointed([store], number, layout, checkpoint_id=f"step-{number}", copies=1, size_bytes=SMALL)
        noted = replace(saved, notes={"metrics": {"loss": loss}})
        (store.root / f"step-{number}" / ".manifest.json").write_bytes(noted.encode())
    with running_agent(store.root, *QUICK) as agent:
        set_policy(agent, Retention(keep_last=9, keep_every=3, keep_best="loss"), revision=1)
        done = command("prune", "--keep-last", "1", "--keep-period", "4", "--root", store.root)
        assert (done.returncode, done.stderr) == (ExitCode.OK, "")
        assert "stays: it has the best 'loss' (0.1)" in done.stdout
        assert steps_in(store) == [2, 3, 4, 5]
        assert command("prune", "--keep-last", "1", "--keep-every", "2", "--root", store.root).returncode == ExitCode.OK
        assert steps_in(store) == [2, 3, 4, 5]
