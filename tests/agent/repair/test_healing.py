"""Agents alone: what is intact anywhere heals what is not, nothing gives way to what was not seen, and "done" is true."""

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
"""Options of agents that must not take a node for lost within a test."""


def command(verb: str, root: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """The command line in this process: agents run, and a Python that starts for each call is most of a test."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main([verb, "--root", str(root), *options])
    return subprocess.CompletedProcess(verb, code, said.getvalue())


def as_json(verb: str, root: Path) -> tuple[int, dict[str, Any]]:
    done = command(verb, root, "-o", "json")
    return done.returncode, json.loads(done.stdout)


def of_save(store: LocalStore) -> int:
    """The number of the save that a store's checkpoint is of, as `checkpointed` counts them; 0: its manifest is damaged."""
    return next((holding.sequence for holding in LocalStore(store.root).catalog.holdings("", "step-1")), 0)


def rounds(running: RunningAgent, count: int) -> None:
    """Lets the agent do so many rounds of re-protection more."""
    before = status(running)["protection"]["rounds"]
    for done in range(count):
        meet(running)
        wait_for(lambda wanted=before + done: status(running)["protection"]["rounds"] > wanted, 90, "a round")  # type: ignore[misc]


def agree(nodes: Sequence[LocalStore], running: Sequence[RunningAgent], *, done: bool) -> None:
    """Status of every agent, `verify` and `repair --dry-run` say the same."""
    code, found = as_json("verify", nodes[0].root)
    wait_for(lambda: not any(status(agent)["restoring"] for agent in running), 90, "rest")
    assert {status(agent)["protection"]["is_complete"] for agent in running} == {done}
    assert found["is_intact"] is done
    assert (code == ExitCode.OK) is done
    assert (command("repair", nodes[0].root, "--dry-run").returncode == ExitCode.OK) is done


def test_metadata_and_manifest_are_mended_by_each_other(tmp_path: Path) -> None:
    """`.metadata` bad on one node, the manifest on the other: both are restored, and a third node gets both."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes[:2], 1, PAIR)
    flip(nodes[0].root / "step-1" / METADATA_NAME, 100)
    flip(nodes[1].root / "step-1" / MANIFEST_NAME, 60)
    with agents(nodes, *PATIENT, "--scrub-every-s", "0.5") as running:
        wait_for(lambda: not any(findings(store) for store in nodes), 90, "being whole again")
        wait_for(protected(*running), 90, "being done")
        assert of_save(nodes[2]) == 1
        agree(nodes, running, done=True)
    assert [quarantined(store) for store in nodes] == [[METADATA_NAME], [MANIFEST_NAME], []]


def test_repair_mends_metadata_and_manifest_by_each_other(tmp_path: Path) -> None:
    """The command does in one call what it says, with an agent that has met nobody."""
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
def test_a_directory_of_metadata_alone_counts(tmp_path: Path, name: str) -> None:
    """A node without shards has lost its manifest, or has the only intact metadata: it takes part by checksum."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (1, 0)})
    (nodes[2].root / "step-1" / MANIFEST_NAME).unlink()
    for store in nodes[:2]:
        (store.root / "step-1" / METADATA_NAME).unlink()
    if name == METADATA_NAME:
        (nodes[0].root / "step-1" / MANIFEST_NAME).write_bytes(b"{}")
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: not any(findings(store) for store in nodes), 90, "being whole again")
        wait_for(protected(*running), 90, "being done")
        assert [of_save(store) for store in nodes] == [1, 1, 1]
        agree(nodes, running, done=True)


@pytest.mark.parametrize("damage", mark_long(["flip", "cut", "gone"], keep=["cut"]))
def test_a_footer_is_rebuilt_from_the_last_copys_data(tmp_path: Path, damage: str) -> None:
    """The other copy's node is lost, this one's footer damaged: the data is all that is needed."""
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
        wait_for(protected(*running), 90, "being done")
        agree(nodes[:1], running, done=True)
    assert path.read_bytes() == raw
    assert quarantined(nodes[0]) == [shard(0)]


def test_a_damaged_copy_beyond_those_wanted_is_mended(tmp_path: Path) -> None:
    """Three copies of two that are wanted, one of them bad: verify says so, repair mends it, and all agree afterwards."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    shutil.copy(nodes[0].root / "step-1" / shard(0), nodes[2].root / "step-1" / shard(0))
    flip(nodes[2].root / "step-1" / shard(0), 1000)
    with agents(nodes, *PATIENT) as running:
        wait_for(protected(*running), 90, "being at rest, as nobody has read the file yet")
        assert command("repair", nodes[0].root).returncode == ExitCode.OK
        wait_for(protected(*running), 90, "being done")
        agree(nodes, running, done=True)
    assert findings(nodes[2]) == []


def test_verify_has_the_agents_know_what_it_found(tmp_path: Path) -> None:
    """What it names is mended soon, and status never says complete while verify says that it is not."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, *PATIENT) as running:
        wait_for(protected(*running), 90, "being at rest")
        flip(nodes[1].root / "step-1" / shard(1), 1000)
        assert command("verify", nodes[0].root).returncode == ExitCode.FAILED
        wait_for(lambda: held(nodes[1]) == set(PAIR), 90, "the mended copy")
        wait_for(protected(*running), 90, "being done")
        agree(nodes, running, done=True)


def test_a_loss_stays_known(tmp_path: Path) -> None:
    """A shard whose last copy is bad: all say so, and still do when the agents were started again."""
    nodes = stores(tmp_path, 1)
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    flip(nodes[0].root / "step-1" / shard(0), 1000)
    with agents(nodes) as running:
        assert command("verify", nodes[0].root).returncode == ExitCode.SHARD_LOST
        agree(nodes, running, done=False)
    with agents(nodes) as running:
        rounds(running[0], 1)
        assert status(running[0])["protection"]["lost"] == 1
        agree(nodes, running, done=False)


def test_a_file_that_can_be_read_again_is_no_loss(tmp_path: Path) -> None:
    """A disk that failed once and reads again: an agent that starts reads what was known to be bad, and takes that back."""
    nodes = stores(tmp_path, 1)
    manifest = checkpointed(nodes, 1, {shard(0): (0,)}, copies=1)
    path = nodes[0].root / "step-1" / shard(0)
    stat = path.stat()
    note = [["step-1", manifest.save_id, shard(0), [stat.st_ino, stat.st_mtime_ns, stat.st_size], False]]
    raw = json.dumps({"bad": note, "scrubbed_to": ""})
    (nodes[0].agent_directory() / "damage.json").write_text(raw)
    with agents(nodes) as running:
        wait_for(protected(*running), 90, "being done")
        agree(nodes, running, done=True)


def test_a_shard_that_is_of_no_save_is_set_aside(tmp_path: Path) -> None:
    """A file that the manifest does not name: verify names it, re-protection moves it to the quarantine, all agree."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    shutil.copy(nodes[0].root / "step-1" / shard(0), nodes[0].root / "step-1" / shard(9))
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: not (nodes[0].root / "step-1" / shard(9)).exists(), 90, "its removal")
        wait_for(protected(*running), 90, "being done")
        agree(nodes, running, done=True)
    assert quarantined(nodes[0]) == [shard(9)]


def test_a_copy_that_lies_elsewhere_is_not_missing(tmp_path: Path) -> None:
    """A node was meant to hold a copy and another has it: as many as are wanted are there, and nobody says otherwise."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    (nodes[0].root / "step-1" / shard(0)).rename(nodes[2].root / "step-1" / shard(0))
    with agents(nodes, *PATIENT) as running:
        wait_for(protected(*running), 90, "being done")
        agree(nodes, running, done=True)
        assert status(running[0])["protection"]["bytes_copied"] == 0


def test_a_node_that_said_goodbye_makes_nothing_give_way(tmp_path: Path) -> None:
    """A newer save half there, its other half assumed on a node that is away: the older one stays, and loads in the end."""
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
            assert of_save(nodes[2]) == 1
            with running_agent(nodes[1].root, *QUICK) as last:
                everybody = (running[0], back, last)
                meet(*everybody)
                wait_for(lambda: held(nodes[1]) | held(nodes[2]) == set(RING), 90, "all shards")
                for agent in everybody:
                    rounds(agent, 2)
                assert [of_save(store) for store in nodes] == [2, 1, 1]
                assert held(nodes[1]) | held(nodes[2]) == set(RING), "the older one is whole"
                assert status(last)["protection"]["lost"] == 0
                agree(nodes, everybody, done=False)


def test_one_bit_of_a_manifest_makes_nothing_give_way(tmp_path: Path) -> None:
    """A newer save half there, and an older one whole whose manifest is damaged on one node: it gets its own back."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    checkpointed(nodes, 2, RING, on=[0])
    flip(nodes[1].root / "step-1" / MANIFEST_NAME, 60)
    with agents(nodes, *PATIENT) as running:
        wait_for(lambda: of_save(nodes[1]) != 0, 90, "its manifest")
        for agent in running:
            rounds(agent, 2)
        assert [of_save(store) for store in nodes] == [2, 1, 1]
        assert set(RING) == held(nodes[1]) | held(nodes[2])


def test_files_of_an_unknown_save_wait_for_silent_nodes(tmp_path: Path) -> None:
    """A manifest that only an absent node may have: nothing is overwritten, and repair names the node to bring back."""
    nodes = stores(tmp_path, 4)
    checkpointed(nodes[:2], 1, PAIR)
    checkpointed(nodes[2:], 2, PAIR)
    with agents(nodes[2:], *PATIENT) as met:
        wait_for(protected(*met), 90, "being done")
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
            wait_for(lambda: [of_save(store) for store in nodes] == [2] * 4, 90, "the newer save on all nodes")
            wait_for(protected(*running, back), 90, "being done")
            agree(nodes, [*running, back], done=True)


def test_a_lost_shard_names_the_node_to_bring_back(tmp_path: Path) -> None:
    """Both holders are away: verify and repair say which nodes hold it, by id and host."""
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
def test_a_replaced_version_without_its_manifest_gives_the_last_shards(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """The newer save has come to one node alone and cannot be loaded: what it replaced there is the rest of the older."""
    nodes = stores(tmp_path, 2)
    old = checkpointed(nodes, 1, {shard(0): (0,), shard(1): (1,)})
    checkpointed(nodes, 2, {shard(0): (0,), shard(1): (1,)}, on=[0])
    damage(nodes[0].root / "step-1" / replaced_name(old.save_id))
    with agents(nodes, *QUICK):
        wait_for(lambda: held(nodes[1]) == {shard(0), shard(1)}, 30, "the shard")
    assert of_save(nodes[1]) == 1
    assert [finding.save_id for finding in findings(nodes[1])] == []


def test_the_last_copy_of_a_newer_save_is_read_before_the_older_one_goes(tmp_path: Path) -> None:
    """A third node's disk is lost: one has the newer save alone, with a bad block, the other the older one."""
    nodes = stores(tmp_path, 3)
    old = checkpointed(nodes, 1, {shard(0): (0, 1), shard(1): (0, 2)})
    newer = checkpointed(nodes, 2, {shard(0): (1, 2), shard(1): (2, 1)})
    bad, good = sorted(newer.shards)
    flip(nodes[1].root / "step-1" / bad, 100)
    with agents(nodes[:2], *QUICK) as running:
        wait_for(lambda: held(nodes[1]) == {good}, 30, "the bad copy being set aside")
        rounds(running[0], STALE_ROUNDS_MAX + 1)
    assert held(nodes[0]) >= set(old.shards)


def test_a_replaced_version_gets_its_name_back_where_that_is_free(tmp_path: Path) -> None:
    """Retention has removed what had replaced it there, and on another node it has the name: it is one of its copies."""
    nodes = stores(tmp_path, 2)
    made = checkpointed(nodes, 1, PAIR)
    kept = nodes[1].root / "step-1" / replaced_name(made.save_id)
    kept.with_name(MANIFEST_NAME).rename(kept)
    kept.with_name(METADATA_NAME).rename(kept.with_name(version_metadata_name(made.save_id)))
    with agents(nodes, *QUICK) as running:
        wait_for(lambda: of_save(nodes[1]) == 1 and not kept.exists(), 30, "the name")
        wait_for(protected(*running), 30, "being done")
    assert held(nodes[1]) == {shard(0), shard(1)}
    assert [findings(store) for store in nodes] == [[], []]
