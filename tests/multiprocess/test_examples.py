"""Each example does what its README says on real ranks, also after a node loss."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.stores.local.store import LocalStore
from tests.cli.commands import command
from tests.harness.cluster import Call, call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import examples
from tests.steps.states import digests


def example(script: str, *arguments: str, leave_at: str | None = None) -> Call[Any]:
    return call(examples.run, script=f"{script}.py", arguments=arguments, leave_at=leave_at)


def losses(lines: list[str]) -> list[float]:
    return [float(line.partition(": loss ")[2]) for line in lines if ": loss " in line]


@pytest.mark.long
def test_a_job_stopped_by_sigterm_resumes_bit_for_bit(cluster_of: ClusterOf, tmp_path: Path) -> None:
    """One of four ranks gets SIGTERM: all ranks save that step and exit. After a node loss each loss equals an
    undisturbed run's.
    """
    cluster, undisturbed = cluster_of(2), cluster_of(2, base=tmp_path / "undisturbed")
    arguments = ("--steps", "9", "--save-every", "100")
    everything = undisturbed.run(example("checkpoint_manager", *arguments), nodes=[0, 1], ranks=2)[0]
    first = cluster.run(example("checkpoint_manager", *arguments, leave_at="step 4"), nodes=[0, 1], ranks=2)
    assert first[0] == [*everything[:5], "leaving after step 4"]
    assert first[1:] == [[], [], []]
    cluster.nodes[0].lose()
    second = cluster.run(example("checkpoint_manager", *arguments), nodes=[0, 1], ranks=2)[0]
    assert second[0].startswith("starting at step 4")
    assert second[1:] == everything[5:]


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_fsdp1_resumes_after_a_node_loss(cluster_of: ClusterOf, *, sharded: bool) -> None:
    """With full and sharded state dicts, the losses after node 0 is lost equal the first run's. Each node writes one
    full model.
    """
    cluster = cluster_of(2)
    kind = ["--sharded"] if sharded else []
    first = cluster.run(example("fsdp1_fashion_mnist", "--epochs", "7", *kind), nodes=[0, 1], ranks=2)[0]
    cluster.nodes[0].lose()
    again = example("fsdp1_fashion_mnist", "--epochs", "7", "--model-file", *kind)
    second = cluster.run(again, nodes=[0, 1], ranks=2)[0]
    assert second[0] == "resuming from epoch-5 at epoch 5"
    assert second[1:] == [*first[5:], "model.pth: 8 tensors, the same when loaded back"]
    files = [torch.load(f"{node.root}-model.pth", weights_only=True) for node in cluster.nodes]
    assert digests(files[0]) == digests(files[1])


@pytest.mark.long
def test_the_tutorials_checkpoint_loads_anywhere(cluster_of: ClusterOf) -> None:
    """Four ranks save and node 0 is lost. The checkpoint loads on four ranks, three ranks and one process, and converts
    both ways.
    """
    cluster = cluster_of(2)
    (saved,) = cluster.run(example("getting_started", "save"), nodes=[0, 1], ranks=2)[0]
    weights = saved.removeprefix("saved: ")
    cluster.nodes[0].lose()
    load = example("getting_started", "load")
    assert cluster.run(load, nodes=[0, 1], ranks=2)[0] == [f"loaded: {weights}"]
    assert cluster.run(load, nodes=[1, 0], ranks=[2, 1])[0] == [f"loaded: {weights}"]
    load_plain, convert = example("getting_started", "load-plain"), example("getting_started", "convert")
    alone = cluster.launch([load_plain, convert], nodes=[1], launcher="single")
    assert alone.of(load_plain)[0] == [f"loaded: {weights}"]
    assert alone.of(convert)[0] == [f"converted: {weights}", f"converted back: {weights}"]


@pytest.mark.long
def test_stock_programs_need_one_directory_for_all_ranks(cluster_of: ClusterOf) -> None:
    """With one directory for all ranks the stock programs save and load. With one directory per node the load fails."""
    cluster = cluster_of(2, quick_exit=True)
    (saved,) = cluster.run(example("stock/getting_started", "save"), nodes=[0], ranks=2)[0]
    loaded = cluster.run(example("stock/getting_started", "load"), nodes=[0], ranks=2)[0]
    assert loaded == [saved.replace("saved", "loaded")]
    cluster.launch([example("stock/ddp", "--steps", "2", "--save-every", "1")], nodes=[0], ranks=2)
    resumed = cluster.run(example("stock/ddp", "--steps", "3", "--save-every", "1"), nodes=[0], ranks=2)[0]
    assert resumed[0].startswith("rank 0 loaded ")
    cluster.launch([example("stock/getting_started", "save")], nodes=[0, 1])
    load = call(examples.fails_in_stock, script="stock/getting_started.py", arguments=["load"])
    missing = cluster.run(load, nodes=[1, 0])
    assert all("No such file or directory" in text and ".metadata" in text for text in missing)


@pytest.mark.long
def test_ids_that_differ_by_rank_are_refused_or_replaced_by_rank_0s(cluster_of: ClusterOf) -> None:
    """Four ranks make four timestamped ids. With `--checkpoint-id-from all` every rank raises and nothing is written.

    By default rank 0's id is used: rank 0 consolidates the checkpoint, and the job resumes after a node loss.
    """
    cluster = cluster_of(2)
    arguments = ("--steps", "6", "--save-steps", "4")
    strict = call(examples.fails, script="timestamped_output.py", arguments=[*arguments, "--checkpoint-id-from", "all"])
    for failure in cluster.run(strict, nodes=[0, 1], ranks=2):
        assert failure["types"] == ["CheckpointIdMismatch"]
        assert len(set(failure["id_by_rank"].values())) == 4
    assert not any(list(node.disk.glob("out-*")) for node in cluster.nodes)
    run = example("timestamped_output", *arguments)
    first = cluster.run(run, nodes=[0, 1], ranks=2)[0]
    assert "consolidated 5 tensors, as trained" in first
    assert [len(list(node.disk.glob("out-*"))) for node in cluster.nodes] == [1, 1]
    cluster.nodes[0].lose()
    second = cluster.run(run, nodes=[0, 1], ranks=2)[0]
    assert second == ["starting at step 4", *first[-2:]]
    assert cluster.run(run, nodes=[0, 1], ranks=2)[0] == second, "two timestamped ids exist now"


def test_ddp_saves_once_and_loads_everywhere(cluster_of: ClusterOf) -> None:
    """Four ranks share the work of one copy. It loads after a node loss, with a late rank, and on three ranks."""
    cluster = cluster_of(2)
    late = ("--late-rank", "1", "--late-s", "1")
    first = cluster.run(example("ddp", "--steps", "6", "--save-every", "4", *late), nodes=[0, 1], ranks=2)
    saved = [next(line for line in lines if "saved" in line).split() for lines in first]
    sizes = [int(line[3]) for line in saved]
    (weights,) = {line[5] for line in saved}
    state = 3 * 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)  # parameters and two moments, float32
    assert state < sum(sizes) < 1.2 * state
    assert max(sizes) < 0.6 * state
    cluster.nodes[0].lose()
    again = cluster.run(example("ddp", "--steps", "6", "--save-every", "4", *late), nodes=[0, 1], ranks=2)
    assert [lines[0] for lines in again] == [f"rank {r} loaded step-4 onto cpu: {weights}" for r in range(4)]
    # DDP rebuilds its buckets after its first step. A sum in another order may differ in its last digit.
    assert losses(again[0]) == pytest.approx(losses(first[0])[-2:], rel=1e-6)
    three = cluster.run(example("ddp", "--steps", "5"), nodes=[1, 0], ranks=[2, 1])
    assert [lines[0] for lines in three] == [f"rank {r} loaded step-4 onto cpu: {weights}" for r in range(3)]


def test_saves_every_few_steps_are_whole(cluster_of: ClusterOf) -> None:
    """The example prints step times with and without asynchronous saves. At its end both nodes have the whole last
    save.
    """
    cluster = cluster_of(2)
    run = example("async_every_few_steps", "--steps", "9", "--save-every", "3", "--width", "64")
    without, with_saves, newest = cluster.run(run, nodes=[0, 1])[0]
    figure = r"[0-9]+\.[0-9]+"
    every = rf"{figure} ms a step \(median\), {figure} ms \(99 of 100\)"
    assert re.fullmatch(rf"without saves: {every}; {figure} s in all", without), without
    saving = rf'with ack="peer": {every}; {figure} ms a step that saves; {figure} s in all'
    assert re.fullmatch(saving, with_saves), with_saves
    assert newest == "newest checkpoint: step 9"
    for node in cluster.nodes:
        assert node.files("step-9") == {".metadata", ".manifest.json", "__0_0.distcp", "__1_0.distcp"}


def test_the_shortest_job_resumes_after_a_node_loss(cluster_of: ClusterOf) -> None:
    """The FSDP2 job on FashionMNIST resumes from the newest surviving checkpoint, with the first run's losses."""
    cluster = cluster_of(2)
    run = example("fashion_mnist", "--steps", "4", "--save-every", "2")
    first = cluster.run(run, nodes=[0, 1])[0]
    assert first[0].startswith("starting at step 0")
    cluster.nodes[0].lose()
    shutil.rmtree(cluster.nodes[1].disk / "step-4")
    second = cluster.run(run, nodes=[0, 1])[0]
    assert second[0].startswith("starting at step 2")
    assert second[1:] == first[2:]


def test_getting_started_ends_with_a_good_status(cluster_of: ClusterOf) -> None:
    """A node loses its disk and a blank one replaces it. After the command that `status` advises, `status` returns 0."""
    cluster = cluster_of(2)
    cluster.launch([example("fashion_mnist", "--steps", "4", "--save-every", "2")], nodes=[0, 1])
    root, gone = cluster.nodes[0].disk, LocalStore(cluster.nodes[1].disk).node_id()
    shutil.rmtree(cluster.nodes[1].disk)
    resumed = cluster.run(example("fashion_mnist", "--steps", "6", "--save-every", "2"), nodes=[0, 1])[0]
    assert resumed[0].startswith("starting at step 4")
    advised = f"replicated-ckpt repair --root {root} --lost {gone}"
    if (
        f"`{advised}`" in command("status", "--root", root).stdout
    ):  # else re-protection, which waits 30 s, has begun by itself
        assert command(*advised.split()[1:]).returncode == ExitCode.OK
    done = command("status", "--root", root)
    assert (done.returncode, done.stdout.splitlines()[0]) == (ExitCode.OK, "good"), done.stdout
    assert f"`replicated-ckpt forget {gone} --root {root}`" in done.stdout
    assert command("verify", "step-4", "--root", root).stdout.splitlines()[-1].endswith("1 node did not answer")
    cluster.stop_agents()
    done = command("status", "--root", root)
    assert (done.returncode, done.stdout.splitlines()[0]) == (ExitCode.OK, "idle"), done.stdout
