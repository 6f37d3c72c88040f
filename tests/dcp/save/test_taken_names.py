"""A save under an existing id with overwrite=False replaces only a checkpoint that is certainly lost. Any other one is
kept.
"""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.dcp.save import numbering
from replicated_ckpt.errors import CheckpointExists, ReplicatedCkptError, ReplicatedCkptWarning
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, held, introduced, shard
from tests.damage import make_newer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EACH_ITS_OWN = {shard(0): (0,), shard(1): (1,)}


def save(root: Path, checkpoint_id: str = "step-1", value: float = 2.0) -> None:
    state = {"w": torch.full((8,), value)}
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=ReplicatedWriter(root, copies=1, overwrite=False))


def loaded(root: Path, checkpoint_id: str = "step-1") -> float:
    state = {"w": torch.zeros(8)}
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root))
    return float(state["w"][0])


def refusal(root: Path, checkpoint_id: str = "step-1") -> ReplicatedCkptError:
    with pytest.raises(CheckpointException) as raised:
        save(root, checkpoint_id)
    error = raised.value.failures[0][0]
    assert isinstance(error, ReplicatedCkptError)
    return error


@pytest.mark.parametrize("gone", [["__0_0.distcp"], [".metadata"]])
def test_a_lost_checkpoint_does_not_block_its_id(tmp_path: Path, gone: list[str]) -> None:
    """The only node lost a shard or `.metadata`: the save replaces the checkpoint."""
    save(tmp_path, value=1.0)
    for name in gone:
        (tmp_path / "step-1" / name).unlink()
    save(tmp_path, value=2.0)
    assert loaded(tmp_path) == 2.0


@pytest.mark.parametrize("gone", [[".metadata", ".manifest.json"], [".manifest.json"]])
def test_a_checkpoint_without_a_manifest_stays(tmp_path: Path, gone: list[str]) -> None:
    """Without a manifest the nodes and the format are unknown: the save raises CheckpointExists, and the files stay."""
    save(tmp_path, value=1.0)
    for name in gone:
        (tmp_path / "step-1" / name).unlink()
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointExists)
    assert "overwrite=True" in error.hint or gone == [".manifest.json"]  # stock torch can read the rest
    assert (tmp_path / "step-1" / "__0_0.distcp").exists()


def test_a_newer_format_stays(tmp_path: Path) -> None:
    save(tmp_path, value=1.0)
    make_newer(tmp_path / "step-1" / MANIFEST_NAME)
    before = sorted((tmp_path / "step-1").iterdir())
    assert isinstance(refusal(tmp_path), ReplicatedCkptError)
    assert sorted((tmp_path / "step-1").iterdir()) == before


def test_a_save_of_stock_torch_that_died_stays(tmp_path: Path) -> None:
    """Stock torch's checkpoint is kept, also without `.metadata`, which another node may have."""
    folder = tmp_path / "step-1"
    dcp.save({"w": torch.ones(8)}, checkpoint_id=folder)
    assert isinstance(refusal(tmp_path), CheckpointExists)
    state = {"w": torch.zeros(8)}
    dcp.load(state, storage_reader=FileSystemReader(folder))
    assert state["w"][0] == 1.0
    (folder / ".metadata").unlink()
    assert isinstance(refusal(tmp_path), CheckpointExists)
    assert (folder / "__0_0.distcp").exists()


def test_a_node_that_does_not_answer_may_hold_what_is_missing(tmp_path: Path) -> None:
    """The node with the other shard is unreachable: the save raises CheckpointExists, which names the shard and the
    node.
    """
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    checkpointed(stores, 1, EACH_ITS_OWN, copies=1)
    error = refusal(stores[0].root)
    assert isinstance(error, CheckpointExists)
    assert f"Missing: {shard(1)}" in error.message
    assert f"node {stores[1].node_id()} (host1)" in error.message
    assert "overwrite=True" in error.hint
    assert held(stores[0]) == {shard(0)}


@pytest.mark.filterwarnings("ignore:Checkpoints of several runs")  # the test's own checkpoint has no lineage
@pytest.mark.parametrize("is_lost", [False, True])
def test_nodes_that_answer_determine_whether_a_checkpoint_is_lost(tmp_path: Path, is_lost: bool) -> None:
    """All nodes of the checkpoint answer: a complete one is kept, and one with a lost shard is replaced."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    checkpointed(stores, 1, EACH_ITS_OWN, copies=1)
    if is_lost:
        (stores[1].root / "step-1" / shard(1)).unlink()
    with running_agent(stores[0].root) as first, running_agent(stores[1].root) as second:
        introduced(stores[0], [first.endpoint.address(), second.endpoint.address()])
        if not is_lost:
            assert isinstance(refusal(stores[0].root), CheckpointExists)
            return
        save(stores[0].root)
        assert loaded(stores[0].root) == 2.0


@pytest.mark.parametrize("kept", ["run", "stock", "manifest"])
def test_another_checkpoint_with_the_id_stays(tmp_path: Path, kept: str) -> None:
    """One checkpoint is lost, but another one has the same id, from another run, stock torch, or without a manifest:
    the save is refused, and the files stay.
    """
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    if kept == "stock":
        dcp.save({"w": torch.ones(8)}, checkpoint_id=stores[0].root / "step-1")
    else:
        checkpointed(stores[:1], 1, {shard(0): (0,)}, copies=1, lineage="a" * 16)
    if kept == "manifest":
        (stores[0].root / "step-1" / MANIFEST_NAME).write_bytes(b"{")
    before = {path: path.read_bytes() for path in (stores[0].root / "step-1").iterdir()}
    save(stores[1].root)
    (stores[1].root / "step-1" / shard(0)).unlink()
    with running_agent(stores[0].root) as first, running_agent(stores[1].root) as second:
        introduced(stores[0], [first.endpoint.address(), second.endpoint.address()])
        error = refusal(stores[0].root)
    assert isinstance(error, CheckpointExists)
    assert stores[0].node_id() in error.message
    assert "overwrite=True" in error.hint
    assert {path: path.read_bytes() for path in (stores[0].root / "step-1").iterdir()} == before


def test_a_save_that_is_being_published_stays(tmp_path: Path) -> None:
    """One node has published the save and another still stages it: the checkpoint is kept."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    manifest = checkpointed(stores, 1, EACH_ITS_OWN, copies=1, on=[0])
    with running_agent(stores[0].root) as first, running_agent(stores[1].root) as second:
        introduced(stores[0], [first.endpoint.address(), second.endpoint.address()])
        with second.client() as client:
            document = {"checkpoint_id": "step-1", "session": "other", "overwrite": False, "peers": []}
            client.call("POST", f"/v1/saves/{manifest.save_id}", document)
        error = refusal(stores[0].root)
        assert isinstance(error, CheckpointExists)
        assert f"node {stores[1].node_id()} at" in error.message


def test_a_checkpoint_that_may_be_in_a_bucket_stays(tmp_path: Path) -> None:
    """A checkpoint that was to be uploaded may be complete in the bucket: it is kept."""
    store = LocalStore(tmp_path)
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, url="s3://bucket/run")
    (tmp_path / "step-1" / shard(0)).unlink()
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointExists)
    assert "s3://bucket/run may have all of it" in error.message


@pytest.mark.parametrize("written_by", ["another run", "stock torch"])
def test_a_process_warns_once_when_it_replaces_another_runs_checkpoint(
    tmp_path: Path, written_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing a checkpoint of another run or of stock torch warns with its id, its run and overwrite=False. The next
    replacement is silent.
    """
    monkeypatch.setattr(numbering, "_replaced_runs", set())  # another test may have warned in this process
    store = LocalStore(tmp_path)
    for number in (1, 2):
        if written_by == "stock torch":
            dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path / f"step-{number}")
        else:
            checkpointed([store], number, {shard(0): (0,)}, copies=1, lineage="b" * 16)
    writer = ReplicatedWriter(tmp_path, copies=1)
    named = "no run, without a readable manifest" if written_by == "stock torch" else f"run '{'b' * 16}'"
    with pytest.warns(ReplicatedCkptWarning, match=f"'step-1' of {named}.*overwrite=False"):
        dcp.save({"w": torch.full((8,), 3.0)}, checkpoint_id="step-1", storage_writer=writer)
    dcp.save({"w": torch.full((8,), 4.0)}, checkpoint_id="step-2", storage_writer=writer)
    dcp.save({"w": torch.full((8,), 5.0)}, checkpoint_id="step-1", storage_writer=writer)
    assert [loaded(tmp_path, f"step-{number}") for number in (1, 2)] == [5.0, 4.0]


def test_a_process_that_has_loaded_a_run_replaces_its_checkpoints_silently(tmp_path: Path) -> None:
    """A job that resumed a run replaces that run's checkpoints without a warning."""
    process = multiprocessing.get_context("fork").Process(target=save, args=(tmp_path, "step-1", 1.0))
    process.start()
    process.join()
    assert loaded(tmp_path) == 1.0
    dcp.save({"w": torch.full((8,), 2.0)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert loaded(tmp_path) == 2.0


@pytest.mark.parametrize(("first", "second"), [("step-1/ema", "step-1"), ("step-1", "step-1/ema")])
def test_one_checkpoint_may_lie_in_the_directory_of_another(tmp_path: Path, first: str, second: str) -> None:
    """Checkpoints with the ids "step-1" and "step-1/ema" are saved, replaced and loaded separately, in either order."""
    save(tmp_path, first, 1.0)
    save(tmp_path, second, 2.0)
    assert [loaded(tmp_path, first), loaded(tmp_path, second)] == [1.0, 2.0]
    dcp.save({"w": torch.full((8,), 3.0)}, checkpoint_id=first, storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert [loaded(tmp_path, first), loaded(tmp_path, second)] == [3.0, 2.0]
