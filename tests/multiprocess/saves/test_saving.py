"""The promises of a save, with every option and planner and with rare uses that DCP allows."""

import os
import shutil
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.environment import DOMAIN_ENV
from tests.agent.agents import wait_for
from tests.harness.cluster import Call, call
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import loss, planning, saving, state

KINDS = ["plain", "meshes"]
NEEDS_RANK_0 = torch.__version__ < TorchVersion("2.8")
"""This DCP uses the coordinator's rank in its group as a rank of the world, with any storage."""


def save(checkpoint_id: str, seed: int = 0, **writer: object) -> Call[Any]:
    return call(state.save, kinds=KINDS, checkpoint_id=checkpoint_id, seed=seed, **writer)


def load(checkpoint_id: str) -> Call[Any]:
    return call(state.load, kinds=KINDS, checkpoint_id=checkpoint_id)


def test_cached_plans_do_not_carry_one_save_into_the_next(cluster_of: ClusterOf) -> None:
    """With plan caching, three saves of changing values are three checkpoints with their own values."""
    ids = ["step-1", "step-2", "step-3"]
    save, loads = call(saving.save_with_cached_plans, kinds=KINDS, checkpoint_ids=ids), [load(name) for name in ids]
    latest = load("latest")
    results = cluster_of(2).launch([save, *loads, latest], nodes=[0, 1])
    saved = results.of(save).agreed()
    assert len({str(digests) for digests in saved}) == 3
    assert [results.of(load).digests().agreed() for load in loads] == saved
    assert results.of(latest).digests().agreed() == saved[2]


@pytest.mark.long
def test_one_planner_serves_saves_of_any_states(cluster_of: ClusterOf) -> None:
    """A CachedSavePlanner saves equal, changed and again equal states, with a failed and a refused save in between.

    Each checkpoint loads with its own values.
    """
    saves = [["fsdp2", "plain"], ["fsdp2", "plain"], ["plain"], ["fsdp2", "plain"], ["fsdp2", "plain"], ["fsdp2"]]
    save = call(planning.save_again_and_again, saves=saves, breaks_at=3, forgets_at=4)
    load_by_id = {
        f"step-{n}": call(state.load, kinds=kinds, checkpoint_id=f"step-{n}") for n, kinds in enumerate(saves)
    }
    results = cluster_of(2).launch([save, *load_by_id.values()], nodes=[0, 1])
    for each in results.of(save):
        assert [(error["save"], error["types"]) for error in each["raised"]] == [
            (3, ["RuntimeError"]),
            (4, ["PlansUnknown"]),
        ]
    for name, load in load_by_id.items():
        assert results.of(load).digests() == [each["digests"][name] for each in results.of(save)]


def test_every_shard_is_on_two_nodes_and_every_node_has_the_metadata(cluster_of: ClusterOf) -> None:
    """Three nodes, two copies: two stores have each shard, all have metadata and manifest, and nothing is staged."""
    cluster = cluster_of(3)
    results = cluster.launch([save("step-1"), call(state.save_report), load("step-1")], nodes=[0, 1, 2])
    held = [cluster.nodes[node].files("step-1") for node in range(3)]
    assert all({".metadata", ".manifest.json"} <= files for files in held)
    for rank, report in enumerate(results.of(state.save_report)):
        assert report["shards"] == [f"__{rank}_0.distcp"]
        assert (report["copies_wanted"], report["copies_made"]) == (2, 2)
        assert report["bytes_replicated"] == report["bytes_written"] > 0
        assert sum(f"__{rank}_0.distcp" in files for files in held) == 2
    assert [node.staging() for node in cluster.nodes] == [[], [], []]
    assert results.of(state.load).digests() == results.of(state.save)
    assert results.all_warnings == []


def test_an_existing_checkpoint_is_replaced_unless_that_is_refused(cluster_of: ClusterOf) -> None:
    """With overwrite=False a second save under an id fails on every rank and changes nothing. By default it replaces
    the first.
    """
    first, second = save("step-1", seed=0), save("step-1", seed=2)
    refused = call(state.save_fails, kinds=KINDS, checkpoint_id="step-1", seed=1, overwrite=False)
    load_first, load_second = load("step-1"), load("step-1")
    cluster = cluster_of(2)
    results = cluster.launch([first, refused, load_first, second, load_second], nodes=[0, 1])
    assert [failure["types"] for failure in results.of(refused)] == [["CheckpointExists"]] * 2
    assert results.of(load_first).digests() == results.of(first)
    assert results.of(load_second).digests() == results.of(second) != results.of(first)
    assert [node.staging() for node in cluster.nodes] == [[], []]
    assert cluster.run(load("step-1"), nodes=[1]).digests() == results.of(second)[:1]


def test_old_checkpoints_are_retired_on_every_node(cluster_of: ClusterOf) -> None:
    """The newest two stay. A replaced node loads the latest, and no old checkpoint is copied to it."""
    ids = [f"step-{number}" for number in range(1, 6)]
    cluster = cluster_of(2)
    keep = call(saving.save_keeping, kinds=KINDS, checkpoint_ids=ids, keep_last=2)
    results = cluster.launch([keep], nodes=[0, 1])
    wait_for(lambda: all(node.checkpoints() == {"step-4", "step-5"} for node in cluster.nodes), 30, "two on each node")
    cluster.nodes[1].lose()
    latest, older = load("latest"), load("step-4")
    after = cluster.launch([latest, older], nodes=[0, 1])
    assert after.of(latest).digests() == [saved[4] for saved in results.of(keep)]
    assert after.of(older).digests() == [saved[3] for saved in results.of(keep)]
    wait_for(lambda: all(node.checkpoints() == {"step-4", "step-5"} for node in cluster.nodes), 30, "the same again")
    assert results.all_warnings == []


def test_ids_of_any_characters_work_on_all_nodes(cluster_of: ClusterOf, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids with spaces, any script and `# ' ( &` are saved, copied, listed, verified, retired and loaded from a peer."""
    ids = [f"läufe #1, it's (step {number}) & 実験" for number in range(1, 5)]
    cluster = cluster_of(2)
    results = cluster.launch([call(saving.save_keeping, kinds=KINDS, checkpoint_ids=ids, keep_last=2)], nodes=[0, 1])
    wait_for(lambda: all(node.checkpoints() == set(ids[2:]) for node in cluster.nodes), 30, "two on each node")
    cluster.nodes[1].lose()
    newest, latest, older = load(ids[3]), load("latest"), load(ids[2])
    after = cluster.launch([newest, latest, older], nodes=[0, 1])
    saved = results.of(saving.save_keeping)
    assert after.of(newest).digests() == after.of(latest).digests() == [digests[3] for digests in saved]
    assert after.of(older).digests() == [digests[2] for digests in saved]
    wait_for(lambda: cluster.nodes[1].checkpoints() == set(ids[2:]), 30, "both on the new node")
    root = str(cluster.nodes[0].root)
    assert main(["ls", "--root", root]) == 0
    listed = capsys.readouterr().out
    assert all(checkpoint_id in listed for checkpoint_id in ids[2:])
    assert main(["verify", "--root", root, ids[3]]) in (ExitCode.OK, ExitCode.UNREACHABLE)
    printed = capsys.readouterr().out  # the job is over; its agents may have exited
    assert "intact" in printed or "all that was read is intact" in printed
    assert results.all_warnings == []


def test_copies_on_one_host_are_warned_of_and_counted(
    cluster_of: ClusterOf, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two roots on one host without domains: the save warns once, and `ls` and `status` count hosts."""
    cluster = cluster_of(2, environment={DOMAIN_ENV: ""})
    results = cluster.launch([save("step-1"), load("latest")], nodes=[0, 1])
    (warning,) = results.all_warnings
    assert "the 2 nodes of this save are on 1 host" in warning
    root = str(cluster.nodes[0].root)
    for verb in ("ls", "status"):
        main([verb, "--root", root])
        listed = capsys.readouterr().out
        assert "2 of 2 nodes answered; 1 with copies of one shard on one host" in listed
        assert ("2 of 2, on 1 host" in listed) == (verb == "ls")
    assert main(["verify", "--root", root, "step-1"]) == ExitCode.OK


def test_a_save_keeps_user_files_in_its_directory(cluster_of: ClusterOf) -> None:
    """A user's files on one node survive saves and retention, and are copied to no other node."""
    cluster = cluster_of(2)
    for checkpoint_id in ("step-1", "step-3"):
        folder = cluster.nodes[1].root / checkpoint_id / "tokenizer"
        folder.mkdir(parents=True)
        (folder / "vocab.txt").write_text(checkpoint_id)
    ids = ["step-1", "step-2", "step-3"]
    cluster.launch([call(saving.save_keeping, kinds=KINDS, checkpoint_ids=ids, keep_last=1)], nodes=[0, 1])
    wait_for(lambda: all(node.checkpoints() == {"step-3"} for node in cluster.nodes), 30, "one on each node")
    replacing = save("step-3", seed=7)
    again = cluster.launch([replacing, load("step-3"), save("step-3", seed=7)], nodes=[0, 1])
    assert again.of(state.load).digests() == again.of(replacing)
    (warning,) = again.all_warnings  # this job has not loaded or saved that run before
    assert "this save replaces the checkpoint 'step-3' of run" in warning
    assert not (cluster.nodes[0].root / "step-1").exists()
    for checkpoint_id in ("step-1", "step-3"):
        assert (cluster.nodes[1].root / checkpoint_id / "tokenizer" / "vocab.txt").read_text() == checkpoint_id


@pytest.mark.long
def test_every_rank_of_a_manager_sees_the_same_steps(cluster_of: ClusterOf) -> None:
    """Steps, notes and the best step are equal on all ranks, also on a blank node. Rank 1's metrics are ignored."""
    cluster = cluster_of(2)
    (saved,) = {str(found) for found in cluster.run(call(saving.manage_steps, steps=3), nodes=[0, 1])}
    cluster.nodes[0].lose()
    (found,) = {str(found) for found in cluster.run(call(saving.manage_steps, steps=0), nodes=[0, 1])}
    assert (
        found == saved == str({"latest": 3, "all": [1, 2, 3], "best": 2, "losses": [0.5, 0.25, 0.75], "restored": 2.0})
    )


def test_an_unexpected_error_reaches_all_ranks(cluster_of: ClusterOf) -> None:
    """During an agreement, e.g. to delete a step, a rank raises its own error. The others raise RankFailed and do not
    wait.
    """
    other, own = cluster_of(2).run(call(saving.agree_where_one_breaks), nodes=[0, 1])
    assert other.startswith("RankFailed: Rank 1 failed with OSError: it breaks on purpose.")
    assert own == "OSError: it breaks on purpose"


@pytest.mark.parametrize("closes_late", mark_long([False, True], keep=[False]))
def test_closed_managers_keep_no_process_group_alive(cluster_of: ClusterOf, closes_late: bool) -> None:
    """Gloo's threads abort the process at its exit: after `destroy_process_group` and `close` there are none.

    Managers may also be closed after the program has destroyed the groups.
    """
    counting = call(saving.count_threads_of_gloo, closes_late=closes_late)
    for found in cluster_of(2).run(counting, nodes=[0, 1]):
        if found["before"] == 0:
            pytest.skip("the gloo threads of this torch have no name")
        assert found["before"] > 6
        assert (found["destroyed"] > 0) == closes_late
        assert found["after"] == 0


@pytest.mark.parametrize("ends_before", [False, True])
def test_a_save_whose_groups_were_destroyed_is_named(cluster_of: ClusterOf, ends_before: bool) -> None:
    """The error names the lost step, the newest remaining one, and the next step. A save that had ended by then raises
    nothing.
    """
    cluster = cluster_of(2)
    destroying = call(saving.destroy_groups_behind_a_save, ends_before=ends_before)
    for message in cluster.run(destroying, nodes=[0, 1]):
        assert ("'step-2' is lost" in message and "before destroy_process_group" in message) != ends_before
    there = {"step-1", "step-2"} if ends_before else {"step-1"}
    assert [node.checkpoints() for node in cluster.nodes] == [there] * 2
    for name in there:
        assert main(["verify", "--root", str(cluster.nodes[0].disk), name]) in (ExitCode.OK, ExitCode.UNREACHABLE)


def test_a_step_is_deleted_on_every_node(cluster_of: ClusterOf) -> None:
    """`delete` removes the step on both nodes, returns the same on all ranks, and no copy comes back."""
    cluster = cluster_of(2)
    cluster.launch([call(saving.manage_steps, steps=3)], nodes=[0, 1])
    deleted = cluster.run(call(saving.delete_steps, steps=[1, 3, 9]), nodes=[0, 1])
    assert deleted == [[[True, True, False], [2]]] * 2
    assert [node.checkpoints() for node in cluster.nodes] == [{"step-2"}] * 2
    again = cluster.run(call(saving.manage_steps, steps=0), nodes=[1, 0])
    assert [found["all"] for found in again] == [[2], [2]]
    assert [node.checkpoints() for node in cluster.nodes] == [{"step-2"}] * 2


def test_ids_that_differ_by_rank_are_refused(cluster_of: ClusterOf) -> None:
    """Ranks with ids from their own clocks raise, name every rank's id, and write nothing."""
    cluster = cluster_of(2)
    calls = [save("step-1"), call(saving.save_under_own_id, kinds=KINDS), call(loss.staging_left), load("latest")]
    results = cluster.launch(calls, nodes=[0, 1])
    for failure in results.of(saving.save_under_own_id):
        assert failure["types"] == ["CheckpointIdMismatch"]
        assert failure["id_by_rank"] == {"0": "step-10-0", "1": "step-10-1"}
        assert failure["seconds"] < 20
    assert results.of(loss.staging_left) == [[], []]
    assert results.of(state.load).digests() == results.of(state.save)
    assert not any((node.disk / f"step-10-{rank}").exists() for node in cluster.nodes for rank in (0, 1))


def test_options_that_differ_by_rank_are_refused(cluster_of: ClusterOf) -> None:
    """Every rank raises, names the ranks of each value, and writes nothing."""
    other = call(saving.save_with_other_ack, kinds=KINDS, checkpoint_id="step-2", acks=["peer", "peer", "local"])
    calls = [save("step-1"), other, call(loss.staging_left), load("latest")]
    results = cluster_of(2).launch(calls, nodes=[0, 0, 1])
    for failure in results.of(other):
        assert (failure["types"], failure["seconds"] < 20) == (["ConfigInvalid"], True)
        assert "ack is 'peer' on ranks 0, 1 (host" in failure["message"]
        assert "'local' on rank 2" in failure["message"]
    assert results.of(loss.staging_left) == [[], [], []]
    assert results.of(state.load).digests() == results.of(state.save)


def test_managers_that_differ_are_refused(cluster_of: ClusterOf) -> None:
    """Managers whose options differ by rank raise on every rank. A new manager works."""
    options = {"every": 2, "preempt_on": [], "memory": True}
    calls = [call(saving.manage_unlike, options=options), call(saving.manage_steps, steps=1)]
    results = cluster_of(2).launch(calls, nodes=[0, 1])
    for name, value, text in zip(options, ("2", "()", "True"), results.of(saving.manage_unlike).agreed(), strict=True):
        assert text.startswith(f"The ranks ask for different saves: {name} is ")
        assert f"; {value} on rank 1 (host " in text
    assert results.of(saving.manage_steps).agreed()["all"] == [1]


def test_an_absolute_path_inside_the_root_is_a_name(cluster_of: ClusterOf) -> None:
    """`root / "step-1"` is the id "step-1", although the root's path differs by node. A path outside the root raises."""
    outside = call(state.save_fails, kinds=KINDS, checkpoint_id="/elsewhere/step-2")
    calls = [call(saving.save_under_path, kinds=KINDS, checkpoint_id="step-1"), load("step-1"), outside]
    results = cluster_of(2).launch(calls, nodes=[0, 1])
    assert results.of(state.load).digests() == results.of(saving.save_under_path)
    assert [failure["types"] for failure in results.of(outside)] == [["ConfigInvalid"]] * 2


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(
            [1, 2], marks=pytest.mark.skipif(NEEDS_RANK_0, reason="DCP of this torch needs rank 0 in the group")
        ),
        pytest.param([0, 1], marks=() if NEEDS_RANK_0 else pytest.mark.long),
    ],
)
def test_a_subgroup_saves_and_loads_by_itself(cluster_of: ClusterOf, ranks: list[int]) -> None:
    """A `process_group=` of two ranks, also without the world's rank 0, saves and loads without the third."""
    subgroup = call(saving.save_in_subgroup, kinds=["plain"], checkpoint_id="step-1", ranks=ranks)
    cluster, (idle,) = cluster_of(3), {0, 1, 2} - {*ranks}
    results = cluster.run(subgroup, nodes=[0, 1, 2])
    assert results[idle] is None
    members = [member for member in results if member is not None]
    assert len(members) == len(ranks)
    assert [member["loaded"] for member in members] == [member["saved"] for member in members]
    assert not (cluster.nodes[idle].disk / "step-1").exists()
    alone = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="step-1"), nodes=[ranks[-1]])
    assert alone.digests() == [members[0]["saved"]]


def test_one_node_keeps_one_copy_and_warns(cluster_of: ClusterOf) -> None:
    """On a single node the save succeeds and warns that it has no second copy."""
    results = cluster_of(1).launch([save("step-1"), load("step-1")], nodes=[0], ranks=2)
    assert results.of(state.load).digests() == results.of(state.save)
    assert any("cop" in text for text in results.all_warnings)


def test_nodes_with_the_same_path_and_different_disks(cluster_of: ClusterOf) -> None:
    """Every node has the same absolute root, on its own disk: nodes are not identified by path."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("private mounts need root and unshare")
    cluster = cluster_of(2, private_mounts=True)
    saved = cluster.launch([save("step-1"), load("step-1")], nodes=[0, 1])
    assert saved.of(state.load).digests() == saved.of(state.save)
    assert all({"__0_0.distcp", "__1_0.distcp", ".metadata"} <= node.files("step-1") for node in cluster.nodes)
    cluster.nodes[0].lose()
    loaded = cluster.run(load("step-1"), nodes=[0, 1])
    assert loaded.digests() == saved.of(state.save)
