"""That a node has had a checkpoint saved over by another run concerns parts of it that are left, nothing that is wanted."""

import shutil
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, shard
from tests.agent.repair.test_retention import (
    OTHER,
    OURS,
    PAIR,
    QUICK,
    RING,
    SMALL,
    agents,
    gone_to,
    meet,
    read_by,
    stays,
    tell_policies,
    there,
)
from tests.cli.commands import command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


def is_noted(store: LocalStore, save_id: str) -> bool:
    return store.saved_over.has(save_id)


def test_a_copy_under_another_name_that_was_saved_over_says_nothing_of_the_checkpoint_itself(tmp_path: Path) -> None:
    """A node that lost it later said that it had been saved over, so no other one brought it back."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    theirs = checkpointed(stores, 9, RING, size_bytes=SMALL, lineage=OTHER)
    shutil.copytree(stores[0].root / "step-1", stores[0].root / "best")
    checkpointed(stores, 1, RING, checkpoint_id="best", size_bytes=SMALL, lineage=OURS, replaces=[theirs.save_id])
    shutil.rmtree(stores[0].root / "step-1")
    with agents(stores):
        wait_for(lambda: held(stores[0]) == {shard(0), shard(2)}, 20, "its copies again")
    assert [findings(store) for store in stores] == [[], [], []]


def test_what_a_user_has_put_back_is_looked_after_also_when_a_node_loses_it(tmp_path: Path) -> None:
    """The note of the node ends once it has it again, as that of a removal by hand does."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    theirs = checkpointed(stores, 9, RING, size_bytes=SMALL, lineage=OTHER)
    for index, store in enumerate(stores):
        shutil.copytree(store.root / "step-1", tmp_path / f"backup{index}")
    whole = {shard(0): (0,), shard(1): (0,), shard(2): (0,)}
    checkpointed(stores, 1, whole, copies=1, size_bytes=SMALL, lineage=OURS, replaces=[theirs.save_id])
    assert is_noted(stores[0], theirs.save_id)
    for index, store in enumerate(stores):
        shutil.rmtree(store.root / "step-1")
        shutil.rmtree(store.root / ".replaced", ignore_errors=True)
        shutil.copytree(tmp_path / f"backup{index}", store.root / "step-1")
    with agents(stores) as running:
        with running[0].client() as client:
            look = partial(client.call, "GET", "/v1/status")
            wait_for(lambda: look()["protection"]["rounds"] > 1, 20, "a look at what was put back")
        shutil.rmtree(stores[0].root / "step-1")
        meet(*running)
        wait_for(lambda: held(stores[0]) == {shard(0), shard(2)}, 20, "its copies again")
    assert not is_noted(stores[0], theirs.save_id)
    assert [findings(store) for store in stores] == [[], [], []]


def test_a_whole_checkpoint_with_which_a_node_was_away_gets_its_copies_again(tmp_path: Path) -> None:
    """What had replaced it is retired by now: it is the checkpoint of its name, and a single copy was all that it had."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    ours, pair = {shard(0): (0,), shard(1): (0,)}, {shard(0): (2, 0), shard(1): (2, 1)}
    theirs = checkpointed(stores, 9, pair, size_bytes=SMALL, lineage=OTHER)
    checkpointed(stores, 1, ours, copies=1, size_bytes=SMALL, on=(0, 1), lineage=OURS, replaces=[theirs.save_id])
    for number in (2, 3):
        checkpointed(stores, number, RING, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    policies = [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()]
    with agents(stores[:2]) as running:
        for agent in running:
            tell_policies(agent, policies)
        gone_to(stores[:2], [2, 3])
        wait_for(lambda: not any(store.catalog.list_replaced() for store in stores[:2]), 20, "the end of it")
    assert [is_noted(store, theirs.save_id) for store in stores] == [True, True, False]
    with agents(stores):
        wait_for(lambda: [held(store) for store in stores[:2]] == [{shard(0)}, {shard(1)}], 20, "its copies again")
        wait_for(lambda: not any(is_noted(store, theirs.save_id) for store in stores), 20, "the end of the notes")
        assert command("verify", "--root", stores[0].root).returncode == ExitCode.OK
    assert [findings(store) for store in stores] == [[], [], []]


def test_what_a_load_reads_on_one_node_while_another_one_retires_it_goes_there_later(tmp_path: Path) -> None:
    """It lies there whole, and has lost its name: of what had replaced it the other node's part is gone by then."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    theirs = checkpointed(stores, 9, {shard(0): (0,)}, copies=1, size_bytes=SMALL, lineage=OTHER)
    ours = {shard(0): (0,), shard(1): (1,)}
    checkpointed(stores, 1, ours, copies=1, size_bytes=SMALL, lineage=OURS, replaces=[theirs.save_id])
    for number in (2, 3):
        checkpointed(stores, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    policies = [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()]
    load = {"lineage": "", "sequence": 3, "save_id": theirs.save_id, "reader": "session/1"}
    with ExitStack() as stack:
        running = [stack.enter_context(running_agent(store.root, *QUICK)) for store in stores]
        assert [read_by(agent, load) for agent in running] == [True, True]
        meet(*running)
        for agent in running:
            tell_policies(agent, policies)
        stays(stores, *running)
        for agent, store in (*zip(running, stores, strict=True),)[::-1]:  # the reader has gone on to another checkpoint
            read_by(agent, {**load, "save_id": f"{3:032x}"})
            gone_to([store], [2, 3])
        assert not any(store.catalog.list_replaced() for store in stores)
        stays(stores, *running)
    assert [findings(store) for store in stores] == [[], []]


def test_a_whole_checkpoint_that_was_put_back_stays_when_a_part_of_what_replaced_it_comes_back(tmp_path: Path) -> None:
    """A node that was away brings a part of the newer one, which all had retired: by a note elsewhere the old one went."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(3)]
    whole = {shard(0): (0,)}
    theirs = checkpointed(stores, 9, whole, copies=1, size_bytes=SMALL, lineage=OTHER)
    shutil.copytree(stores[0].root / "step-1", tmp_path / "backup")
    newer = {shard(0): (0,), shard(1): (2,)}
    checkpointed(stores, 1, newer, copies=1, size_bytes=SMALL, lineage=OURS, replaces=[theirs.save_id])
    for number in (2, 3):
        checkpointed(stores, number, RING, checkpoint_id=f"step-{number}", size_bytes=SMALL, lineage=OURS)
    policies = [Policy("", NODES, 3, Retention(keep_last=2), lineage=OURS).to_json()]
    shutil.copytree(stores[2].root, tmp_path / "away")
    with agents(stores) as running:
        for agent in running:
            tell_policies(agent, policies)
        gone_to(stores, [2, 3])
        wait_for(lambda: not any(store.catalog.list_replaced() for store in stores), 20, "the end of it")
    assert is_noted(stores[1], theirs.save_id)
    shutil.rmtree(stores[2].root)
    shutil.copytree(tmp_path / "away", stores[2].root)  # as it was when it went
    shutil.copytree(tmp_path / "backup", stores[0].root / "step-1")
    with agents(stores) as running:
        for agent in running:
            tell_policies(agent, policies)
        wait_for(lambda: "step-1" not in _names_of(stores[2], 1), 20, "the newer one's part to go")
        stays(stores[:2], *running)
        assert there(stores[0]) == [1, 2, 3]
    assert held(stores[0]) == {shard(0)}
    assert [findings(store) for store in stores] == [[], [], []]


@pytest.mark.parametrize("runs", [True, False])
def test_commands_say_the_same_of_a_part_that_is_left_whether_an_agent_runs_here_or_not(
    tmp_path: Path, *, runs: bool
) -> None:
    """Without one it was lost, as the notes of this node were not read."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    theirs = checkpointed(stores, 9, {shard(0): (0,), shard(1): (1,)}, copies=1, size_bytes=SMALL, lineage=OTHER)
    whole = {shard(0): (0,), shard(1): (0,)}
    checkpointed(stores, 1, whole, copies=1, size_bytes=SMALL, on=(0,), lineage=OURS, replaces=[theirs.save_id])
    assert is_noted(stores[0], theirs.save_id)
    shutil.rmtree(stores[0].root / "step-1")  # retention has removed it meanwhile
    with agents(stores) as running:
        if not runs:
            running[0].signal(signal.SIGKILL)
            running[0].process.wait(10)
        told = command("ls", "--root", stores[0].root)
        assert "kept no more, still on" in told.stdout, told
        verified = command("verify", "--root", stores[0].root)
        assert verified.returncode == ExitCode.OK, verified
        removed = command("rm", "step-1", "--root", stores[1].root)
        # what is lost with the rest is no good checkpoint, and goes; a node that is silent may have the rest
        assert removed.returncode == (ExitCode.OK if runs else ExitCode.FAILED), removed
        assert there(stores[1]) == ([] if runs else [1])
    assert [findings(store) for store in stores] == [[], []]


def _names_of(store: LocalStore, number: int) -> set[str]:
    return {name for name, manifest in store.catalog.committed() if manifest.save_id == f"{number:032x}"}
