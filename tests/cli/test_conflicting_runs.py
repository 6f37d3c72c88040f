"""`ls` and `status` explain several versions or runs under one name: which one a load takes, and what to do next."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import list_checkpoints
from replicated_ckpt.cli.look.conflicting_runs import describe_conflicting_runs
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import wait_for
from tests.agent.checkpoints import METADATA, checkpointed, held, introduced, replaced_saves, shard
from tests.agent.repair.test_retention import agents
from tests.cli.commands import as_json, command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
AWAY, STRANGER = "0" * 11 + "a", "0" * 11 + "b"
SAVE = "c" * 32


def save_as(store: LocalStore, manifest: Manifest, *, number: int, lineage: str, checkpoint_id: str = "step-1") -> str:
    """Publishes the same shards again as another save. Returns the save id."""
    held = {name: (store.final(manifest.checkpoint_id) / name).read_bytes() for name in manifest.shards}
    changed = replace(
        manifest,
        save_id=f"{number:032x}",
        sequence=number,
        lineage=lineage,
        checkpoint_id=checkpoint_id,
        created_unix_s=1_700_000_000.0 + number,
    )
    store.begin(Intent(changed.save_id, checkpoint_id, "by hand", overwrite=True))
    for name, content in held.items():
        store.path_of_staged(changed.save_id, name).write_bytes(content)
    store.put_small(changed.save_id, ".metadata", METADATA)
    store.put_small(changed.save_id, ".manifest.json", changed.encode())
    store.commit(changed.save_id)
    return changed.save_id


def shown(store: LocalStore) -> tuple[str, str]:
    """The output of `ls` and `status`."""
    ls, status = (command(verb, "--root", store.root) for verb in ("ls", "status"))
    assert ls.returncode == ExitCode.OK, ls.stderr
    assert not status.stderr
    return ls.stdout, status.stdout


def test_a_save_in_doubt_names_the_nodes_that_it_waits_for(tmp_path: Path) -> None:
    """Without an agent, too: which nodes are unreachable, which are unknown, and the command that aborts the save."""
    store = LocalStore(tmp_path / "node0")
    own = store.node_id()
    introduced(store, [AgentAddress(AWAY, "127.0.0.1", 1, "token")])
    store.begin(Intent(SAVE, "step-9", "by hand", overwrite=True, nodes=(own, AWAY, STRANGER), coordinator=AWAY))
    for printed in shown(store):
        (line,) = (line for line in printed.splitlines() if "in doubt: save" in line)
        assert SAVE in line
        assert f"{AWAY}), not reached" in line
        assert f"{STRANGER}, never met" in line or f"{STRANGER}), never met" in line
        assert f"`replicated-ckpt repair --root {store.root} --lost {AWAY} --lost {STRANGER} --dry-run`" in printed
    _, found = as_json("status", "--root", store.root)
    assert any(f"in doubt: save {SAVE} of step-9" in reason for reason in found["reasons"])


def test_a_kept_version_has_its_reason(tmp_path: Path) -> None:
    """The newer save lacks a shard that a silent node may have: the output names the version that loads use, and why
    the older one stays.
    """
    nodes = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    old = checkpointed(nodes, 1, {shard(0): (0, 1)})
    new = checkpointed(nodes, 2, {shard(0): (0, 1), shard(1): (1,)})
    introduced(nodes[0], [AgentAddress(nodes[1].node_id(), "127.0.0.1", 1, "token")])
    for printed in shown(nodes[0]):
        assert f"step-1: 2 versions; a load of this name takes save {old.save_id}" in printed
        assert "1 file not seen: host1 not reached; has the name on host0" in printed
        assert "replaced, but still on host0" in printed
        wait = f"the older ones stay until every shard of save {new.save_id} was seen"
        assert f"step-1: {wait}. The missing shards may be on the nodes that were not reached" in printed
    _, found = as_json("ls", "--root", nodes[0].root)
    assert found["conflicting_runs"][0].startswith("step-1: 2 versions")


def test_two_runs_in_one_directory_are_listed(tmp_path: Path) -> None:
    """The output lists each lineage with its newest checkpoint, which one loads take first, and how to load the other."""
    store = LocalStore(tmp_path / "node0")
    stock = checkpointed([store], 1, {shard(0): (0,)}, checkpoint_id="seed", copies=1)
    ours, theirs = "a" * 16, "b" * 16
    save_as(store, stock, number=9, lineage=theirs, checkpoint_id="run/step-9")
    save_as(store, stock, number=12, lineage=ours, checkpoint_id="run/step-2")
    for printed in shown(store):
        lines = printed.splitlines()
        first = next(
            index
            for index, line in enumerate(lines)
            if line.startswith("2 runs in directory run; a load takes the first")
        )
        assert lines[first + 1].startswith(f"  lineage '{ours}': newest run/step-2, saved at ")
        assert lines[first + 2].startswith(f"  lineage '{theirs}': newest run/step-9, saved at ")
        assert f"`ReplicatedReader(lineage='{theirs}')`" in lines[first + 3]
    assert "runs in the root" not in printed


def test_an_overwritten_checkpoint_of_a_returning_node_has_a_next_step(tmp_path: Path) -> None:
    """A returning node holds a checkpoint that another run has overwritten: the printed command removes only that
    version, and nothing else changes.
    """
    nodes = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    theirs = checkpointed(nodes, 9, {shard(0): (2, 0), shard(1): (0, 1)}, size_bytes=3000, lineage="a" * 16)
    mine = checkpointed(nodes, 1, {shard(0): (0, 1)}, size_bytes=3000, on=(0, 1), lineage="b" * 16)
    with agents(nodes):
        wait_for(
            lambda: not any(replaced_saves(store) for store in nodes),
            20,
            "its removal where it was overwritten",
        )
        step = (
            f"save {theirs.save_id} of another run: to keep both, rename its directory on node {nodes[2].node_id()}; "
        )
        for verb, code in (("ls", ExitCode.OK), ("status", ExitCode.FAILED), ("verify", ExitCode.FAILED)):
            for store in nodes:
                done = command(verb, "--root", store.root)
                assert done.returncode == code, done
                assert "step-1: 2 versions" in done.stdout
                (line,) = (line for line in done.stdout.splitlines() if step in line)
        assert "lost" not in done.stdout
        assert nodes[2].catalog.manifest("step-1").save_id == theirs.save_id
        removed = subprocess.run(
            f"{sys.executable} -m {line.split('`')[1].replace('replicated-ckpt', 'replicated_ckpt')}",
            shell=True,
            check=False,
        )
        assert removed.returncode == ExitCode.OK
        wait_for(lambda: nodes[2].catalog.save_id_of("step-1") == mine.save_id, 20, "the other save there")
        wait_for(lambda: command("verify", "--root", nodes[0].root).returncode == ExitCode.OK, 20, "its copies")
    assert [held(store) for store in nodes[:2]] == [set(mine.shards)] * 2


def test_one_run_and_one_version_print_no_conflict(tmp_path: Path) -> None:
    """With one run and one version, the output has no lines about versions or runs."""
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    for printed in shown(store):
        assert not [word for word in ("version", "runs in", "in doubt") if word in printed.replace(str(store.root), "")]
    assert as_json("status", "--root", store.root)[1]["conflicting_runs"] == []


def test_missing_files_of_a_replaced_version_are_not_lost(tmp_path: Path) -> None:
    """A replaced version that a process reads has lost a shard: `ls` lists it, and `status` does not report lost files."""
    store = LocalStore(tmp_path / "node0")
    old = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    reading = lock_version(store.catalog, "step-1", old.save_id)
    assert reading is not None
    checkpointed([store], 2, {shard(0): (0,)}, copies=1, size_bytes=3000)
    (store.root / "step-1" / shard(0)).unlink()
    ls, status = shown(store)
    assert "no copy seen" in ls or "lost" in ls
    assert "files are lost" not in status
    assert "an older checkpoint" not in status
    assert command("status", "--root", store.root).returncode == ExitCode.OK, "no agent runs, and none is needed"
    reading.release()


def test_holdings_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holdings are listed once, and not again for each checkpoint."""
    store = LocalStore(tmp_path / "node0")
    for number in (1, 2, 3, 4):
        checkpointed([store], number, {shard(0): (0,)}, copies=1, size_bytes=1000, checkpoint_id=f"step-{number}")
    seen = look_at_nodes(store)
    rows, holdings, listed = list_checkpoints(seen), seen.holdings, []

    def listing(of: NodesSeen) -> list[Holding]:
        listed.append(of)
        return holdings

    monkeypatch.setattr(NodesSeen, "holdings", property(listing))
    assert describe_conflicting_runs(rows, seen, store.root) == []
    assert len(listed) <= 2
