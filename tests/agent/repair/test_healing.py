"""Agents without a job restore damaged files, remove nothing while nodes are missing, and report only true completion."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.repair.reprotect import STALE_ROUNDS_MAX
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, replaced_name, version_metadata_name
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, quarantined, shard
from tests.agent.repair.test_reprotect import PAIR, QUICK, RING, agents, meet, protected, status, stores
from tests.agent.repair.test_verify_repair import tree
from tests.damage import flip
from tests.marks import mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
PATIENT = ("--lost-after-s", "600")
"""Options of agents that must not count a node as lost during a test."""


def command(verb: str, root: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command in this process, which saves the start of a Python."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([verb, "--root", str(root), *options])
    return subprocess.CompletedProcess(verb, code, printed.getvalue())


def as_json(verb: str, root: Path) -> tuple[int, dict[str, Any]]:
    done = command(verb, root, "-o", "json")
    return done.returncode, json.loads(done.stdout)


def sequence_in(store: LocalStore) -> int:
    """The sequence of the save under step-1 in a store. 0: its manifest is damaged."""
    return next((holding.sequence for holding in LocalStore(store.root).catalog.holdings("", "step-1")), 0)


def rounds(running: RunningAgent, count: int) -> None:
    """Waits until the agent has done this many further rounds of re-protection."""
    before = status(running)["protection"]["rounds"]
    for done in range(count):
        meet(running)
        wait_for(lambda wanted=before + done: status(running)["protection"]["rounds"] > wanted, 90, "a round")  # type: ignore[misc]


def assert_all_report(nodes: Sequence[LocalStore], running: Sequence[RunningAgent], *, done: bool) -> None:
    """Asserts that the status of every agent, `verify` and `repair --dry-run` all report `done`."""
    code, found = as_json("verify", nodes[0].root)
    wait_for(lambda: not any(status(agent)["restoring"] for agent in running), 90, "the end of all work")
    assert {status(agent)["protection"]["is_complete"] for agent in running} == {done}
    assert found["is_intact"] is done
    assert (code == ExitCode.OK) is done
    assert (command("repair", nodes[0].root, "--dry-run").returncode == ExitCode.OK) is done


def test_agents_restore_metadata_and_manifest(tmp_path: Path) -> None:
    """`.metadata` is damaged on one node, the manifest on the other: both are restored, and a third node gets both."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes[:2], 1, PAIR)
    flip(nodes[0].root / "step-1" / METADATA_NAME, 100)
    flip(nodes[1].root / "step-1" / MANIFEST_NAME, 60)
    with agents(nodes, *PATIENT, "--scrub-every-s", "0.5") as running:
        wait_for(lambda: not any(findings(store) for store in nodes), 90, "the end of all findings")
        wait_for(protected(*running), 90, "all copies")
        assert sequence_in(nodes[2]) == 1
        assert_all_report(nodes, running, done=True)
    assert [quarantined(store) for store in nodes] == [[METADATA_NAME], [MANIFEST_NAME], []]


def test_repair_restores_metadata_and_manifest(tmp_path: Path) -> None:
    """One `repair` restores everything, although the agents have not met."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    flip(nodes[0].root / "step-1" / METADATA_NAME, 100)
    flip(nodes[1].root / "step-1" / MANIFEST_NAME, 60)
    flip(nodes[1].root / "step-1" / shard(0), 1000)
    with agents(nodes, *PATIENT):
        done = command("repair", nodes[0].root)
        assert done.returncode == ExitCode.OK, done.stdout
        assert command("verify", nodes[0].root).returncode == ExitCode.OK
    assert [findings(store) for store in nodes] == [[], []]


@pytest.mark.parametrize("name", mark_long([MANIFEST_NAME, METADATA_NAME], keep=[METADATA_NAME]))
def test_a_node_with_metadata_only_counts(tmp_path: Path, name: str) -> None:
    """A node without shards has lost its manifest, or holds the only intact metadata: both cases are restored by
    checksum.
    """
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (1, 0)})
    (nodes[2].root / "step-1" / MANIFEST_NAME).unlink()
    for store in nodes[:2]:
        (store.root / "step-1" / METADATA_NAME).unlink()
    if name == METADATA_NAME:
        (nodes[0].root / "step-1" / MANIFEST_NAME).write_bytes(b"{}")
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: not any(findings(store) for store in nodes), 90, "the end of all findings")
        wait_for(protected(*running), 90, "all copies")
        assert [sequence_in(store) for store in nodes] == [1, 1, 1]
        assert_all_report(nodes, running, done=True)


@pytest.mark.parametrize("damage", mark_long(["flip", "cut", "gone"], keep=["cut"]))
def test_a_footer_is_rebuilt_from_the_last_copys_data(tmp_path: Path, damage: str) -> None:
    """The other copy is lost, and the footer of this one is damaged: the footer is rebuilt from the data."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    path = nodes[0].root / "step-1" / shard(0)
    raw = path.read_bytes()
    path.write_bytes(
        {"flip": raw[:-30] + bytes([raw[-30] ^ 1]) + raw[-29:], "cut": raw[:-9], "gone": raw[:700_000]}[damage]
    )
    shutil.rmtree(nodes[1].root)
    with agents([nodes[0]], "--scrub-every-s", "0.5") as running:
        wait_for(lambda: held(nodes[0]) == set(PAIR), 90, "the footer")
        wait_for(protected(*running), 90, "all copies")
        assert_all_report(nodes[:1], running, done=True)
    assert path.read_bytes() == raw
    assert quarantined(nodes[0]) == [shard(0)]


def test_a_damaged_copy_beyond_those_wanted_is_mended(tmp_path: Path) -> None:
    """One of three copies is damaged, and two are wanted: `repair` restores it, and all reports agree."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    shutil.copy(nodes[0].root / "step-1" / shard(0), nodes[2].root / "step-1" / shard(0))
    flip(nodes[2].root / "step-1" / shard(0), 1000)
    with agents(nodes, *PATIENT) as running:
        wait_for(protected(*running), 90, "no work, as the damage is not found yet")
        assert command("repair", nodes[0].root).returncode == ExitCode.OK
        wait_for(protected(*running), 90, "all copies")
        assert_all_report(nodes, running, done=True)
    assert findings(nodes[2]) == []


def test_agents_restore_what_verify_found(tmp_path: Path) -> None:
    """Agents restore what `verify` found. After that, `status` and `verify` agree."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, *PATIENT) as running:
        wait_for(protected(*running), 90, "the end of all work")
        flip(nodes[1].root / "step-1" / shard(1), 1000)
        assert command("verify", nodes[0].root).returncode == ExitCode.FAILED
        wait_for(lambda: held(nodes[1]) == set(PAIR), 90, "the restored copy")
        wait_for(protected(*running), 90, "all copies")
        assert_all_report(nodes, running, done=True)


def test_a_loss_stays_known(tmp_path: Path) -> None:
    """The last copy of a shard is damaged: every report says so, also after a restart of the agents."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    flip(nodes[0].root / "step-1" / shard(0), 1000)
    with agents(nodes) as running:
        assert command("verify", nodes[0].root).returncode == ExitCode.SHARD_LOST
        assert_all_report(nodes, running, done=False)
    with agents(nodes) as running:
        rounds(running[0], 1)
        assert status(running[0])["protection"]["lost"] == 1
        assert_all_report(nodes, running, done=False)


def test_a_file_that_can_be_read_again_is_not_lost(tmp_path: Path) -> None:
    """A file was marked as damaged after a transient disk error: a starting agent reads it and clears the mark."""
    nodes = stores(tmp_path, 1)
    manifest = checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    path = nodes[0].root / "step-1" / shard(0)
    stat = path.stat()
    note = [["step-1", manifest.save_id, shard(0), [stat.st_ino, stat.st_mtime_ns, stat.st_size], False]]
    raw = json.dumps({"bad": note, "scrubbed_to": ""})
    (nodes[0].agent_directory() / "damage.json").write_text(raw)
    with agents(nodes) as running:
        wait_for(protected(*running), 90, "all copies")
        assert_all_report(nodes, running, done=True)


def test_a_shard_of_no_save_is_quarantined(tmp_path: Path) -> None:
    """A shard file that no manifest names is moved to the quarantine."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    shutil.copy(nodes[0].root / "step-1" / shard(0), nodes[0].root / "step-1" / shard(9))
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: not (nodes[0].root / "step-1" / shard(9)).exists(), 90, "its removal")
        wait_for(protected(*running), 90, "all copies")
        assert_all_report(nodes, running, done=True)
    assert quarantined(nodes[0]) == [shard(9)]


def test_a_copy_that_lies_elsewhere_is_not_missing(tmp_path: Path) -> None:
    """A copy lies on another node than planned: the number of copies is right, so nothing is copied."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    (nodes[0].root / "step-1" / shard(0)).rename(nodes[2].root / "step-1" / shard(0))
    with agents(nodes, *PATIENT) as running:
        wait_for(protected(*running), 90, "all copies")
        assert_all_report(nodes, running, done=True)
        assert status(running[0])["protection"]["bytes_copied"] == 0


def test_an_older_save_stays_while_the_newer_one_may_be_incomplete(tmp_path: Path) -> None:
    """Half of a newer save is on one node, and the other half on a node that is away: the older save stays, and its
    shards remain complete.
    """
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    checkpointed(nodes, 2, RING, on=[0])
    with agents(nodes) as running:
        for index in (1, 2):
            running[index].signal(signal.SIGTERM)
            assert running[index].process.wait(20) == 0
        with running_agent(nodes[2].root, *QUICK) as back:
            wait_for(lambda: status(back)["protection"]["rounds"] > 1, 90, "a round")
            rounds(back, 3)
            assert sequence_in(nodes[2]) == 1
            with running_agent(nodes[1].root, *QUICK) as last:
                everybody = (running[0], back, last)
                meet(*everybody)
                wait_for(lambda: held(nodes[1]) | held(nodes[2]) == set(RING), 90, "all shards")
                for agent in everybody:
                    rounds(agent, 2)
                assert [sequence_in(store) for store in nodes] == [2, 1, 1]
                assert held(nodes[1]) | held(nodes[2]) == set(RING), "the older save is complete"
                assert status(last)["protection"]["lost"] == 0
                assert_all_report(nodes, everybody, done=False)


def test_a_damaged_manifest_does_not_end_the_older_save(tmp_path: Path) -> None:
    """A newer save is incomplete, and the manifest of the complete older one is damaged on one node: that node gets its
    manifest back.
    """
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    checkpointed(nodes, 2, RING, on=[0])
    flip(nodes[1].root / "step-1" / MANIFEST_NAME, 60)
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: sequence_in(nodes[1]) != 0, 90, "its manifest")
        for agent in running:
            rounds(agent, 2)
        assert [sequence_in(store) for store in nodes] == [2, 1, 1]
        assert set(RING) == held(nodes[1]) | held(nodes[2])


def test_files_of_an_unknown_save_wait_for_silent_nodes(tmp_path: Path) -> None:
    """Only an absent node may have the manifest of some files: they are not overwritten, and `repair` names that node."""
    nodes = stores(tmp_path, 4)
    checkpointed(nodes[:2], 1, PAIR)
    checkpointed(nodes[2:], 2, PAIR)
    with agents(nodes[2:], *PATIENT) as met:
        wait_for(protected(*met), 90, "all copies")
    flip(nodes[2].root / "step-1" / MANIFEST_NAME, 60)
    before = tree(nodes[2].root)
    with agents(nodes[:3], *PATIENT) as running:
        for agent in running:
            rounds(agent, 2)
        done = command("repair", nodes[2].root)
        assert done.returncode == ExitCode.FAILED
        assert f"bring back node {nodes[3].node_id()}" in done.stdout
        assert command("repair", nodes[0].root).returncode in (ExitCode.FAILED, ExitCode.SHARD_LOST)
        assert not any(status(agent)["protection"]["is_complete"] for agent in running)
        assert tree(nodes[2].root) == before
        with running_agent(nodes[3].root, *PATIENT) as back:
            meet(*running, back)
            wait_for(lambda: [sequence_in(store) for store in nodes] == [2] * 4, 90, "the newer save on all nodes")
            wait_for(protected(*running, back), 90, "all copies")
            assert_all_report(nodes, [*running, back], done=True)


def test_a_lost_shard_names_the_node_to_bring_back(tmp_path: Path) -> None:
    """Both holders are away: `repair` names a node to bring back, with its id and host."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (1, 0)}, on=(0, 1, 2))
    with agents(nodes, *PATIENT) as running:
        for index in (0, 1):
            running[index].signal(signal.SIGKILL)
            running[index].process.wait()
        (nodes[2].root / "step-1" / METADATA_NAME).unlink()
        done = command("repair", nodes[2].root)
    assert done.returncode == ExitCode.FAILED
    assert f"bring back node {min(nodes[0].node_id(), nodes[1].node_id())}" in done.stdout
    assert "(host0)" in done.stdout
    assert "nothing to repair" not in done.stdout


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_a_replaced_version_without_its_manifest_completes_the_older_save(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """A newer save reached one node only and is incomplete. The version that it replaced there completes the older
    save.
    """
    nodes = stores(tmp_path, 2)
    old = checkpointed(nodes, 1, {shard(0): (0,), shard(1): (1,)})
    checkpointed(nodes, 2, {shard(0): (0,), shard(1): (1,)}, on=[0])
    damage(nodes[0].root / "step-1" / replaced_name(old.save_id))
    with agents(nodes, *QUICK):
        wait_for(lambda: held(nodes[1]) == {shard(0), shard(1)}, 30, "the shard")
    assert sequence_in(nodes[1]) == 1
    assert [finding.save_id for finding in findings(nodes[1])] == []


def test_the_newer_save_is_read_before_the_older_one_is_removed(tmp_path: Path) -> None:
    """One node has the last copies of the newer save, one of them damaged: the other node keeps the older save."""
    nodes = stores(tmp_path, 3)
    old = checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (0, 2)})
    newer = checkpointed(nodes, 2, {shard(0): (1, 2), shard(1): (2, 1)})
    bad, good = sorted(newer.shards)
    flip(nodes[1].root / "step-1" / bad, 100)
    with agents(nodes[:2], *QUICK) as running:
        wait_for(lambda: held(nodes[1]) == {good}, 30, "the quarantine of the damaged copy")
        rounds(running[0], STALE_ROUNDS_MAX + 1)
    assert held(nodes[0]) >= set(old.shards)


def test_a_replaced_version_is_restored_under_a_free_name(tmp_path: Path) -> None:
    """Retention removed the save that had replaced a version here. Another node has that version under its name, so it
    gets its name back.
    """
    nodes = stores(tmp_path, 2)
    made = checkpointed(nodes, 1, PAIR)
    kept = nodes[1].root / "step-1" / replaced_name(made.save_id)
    kept.with_name(MANIFEST_NAME).rename(kept)
    kept.with_name(METADATA_NAME).rename(kept.with_name(version_metadata_name(made.save_id)))
    with agents(nodes, *QUICK) as running:
        wait_for(lambda: sequence_in(nodes[1]) == 1 and not kept.exists(), 30, "the name")
        wait_for(protected(*running), 30, "all copies")
    assert held(nodes[1]) == {shard(0), shard(1)}
    assert [findings(store) for store in nodes] == [[], []]
