"""Loads of a checkpoint whose optimizer was dropped: the weights load, also with stock torch. The optimizer is refused."""

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from replicated_ckpt import CheckpointManager, OptimizerDropped, ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.dcp.load.metadata_copies import EntriesLeft
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import slim
from tests.agent.agents import wait_for
from tests.agent.checkpoints import findings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZE = 200_000


def state(seed: int) -> dict[str, Any]:
    """A model, an optimizer twice as large, and a step."""
    generator = torch.Generator().manual_seed(seed)
    moments = {name: torch.rand(SIZE, generator=generator) for name in ("exp_avg", "exp_avg_sq")}
    return {
        "model": {"weight": torch.rand(SIZE, generator=generator)},
        "optim": {"state": {"weight": moments}, "param_groups": [{"lr": 0.1 * seed}]},
        "step": torch.tensor(seed),
    }


def save(root: Path, steps: range, **options: Any) -> None:
    writer = ReplicatedWriter(root, copies=1, **options)
    for step in steps:
        dcp.save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer)


def slim_here(root: Path, step: int) -> Manifest:
    manifest = LocalStore(root).catalog.manifest(f"step-{step}")
    assert manifest.weights is not None
    assert slim(root, f"step-{step}", manifest.save_id)
    return manifest


def error_of(failed: BaseException) -> BaseException:
    """The error that rank 0 raised."""
    assert isinstance(failed, CheckpointException)
    return failed.failures[0][0]


def load(root: Path, wanted: Mapping[str, Any], checkpoint_id: str, **planner: Any) -> dict[str, Any]:
    found = copy.deepcopy(dict(wanted))
    reader = ReplicatedReader(root, expect_partial=True)
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, planner=DefaultLoadPlanner(**planner))
    return found


def check_weights(found: Mapping[str, Any], step: int) -> None:
    assert torch.equal(found["model"]["weight"], state(step)["model"]["weight"])
    assert int(found["step"]) == step


def test_the_weights_load(root: Path) -> None:
    """The weights and the step load with this package and with stock torch, from less than half the bytes."""
    save(root, range(1, 3))
    before = sum(path.stat().st_size for path in (root / "step-1").iterdir())
    slim_here(root, 1)
    assert sum(path.stat().st_size for path in (root / "step-1").iterdir()) < before / 2
    wanted = {name: value for name, value in state(7).items() if name != "optim"}
    check_weights(load(root, wanted, "step-1"), 1)
    stock = copy.deepcopy(wanted)
    dcp.load(stock, storage_reader=FileSystemReader(root / "step-1"), no_dist=True)
    check_weights(stock, 1)
    assert findings(LocalStore(root)) == []


@pytest.mark.parametrize("planner", [{}, {"allow_partial_load": True}])
def test_the_optimizer_is_refused(root: Path, planner: dict[str, Any]) -> None:
    """A load of the optimizer raises OptimizerDropped, which names the newest full checkpoint, and changes nothing. A
    full checkpoint loads completely.
    """
    save(root, range(1, 4))
    slim_here(root, 1)
    wanted = state(7)
    with pytest.raises(CheckpointException) as failed:
        load(root, wanted, "step-1", **planner)
    error = error_of(failed.value)
    assert isinstance(error, OptimizerDropped)
    assert (error.checkpoint_id, error.dropped, error.newest_full) == ("step-1", ("optim",), "step-3")
    assert "'step-1' keeps its weights alone: 'optim' was dropped" in str(error)
    assert "load 'step-3', the newest full checkpoint" in error.hint
    assert torch.equal(wanted["model"]["weight"], state(7)["model"]["weight"])
    reader = ReplicatedReader(root)
    reader.reset("step-1")
    assert (
        "optim.state.weight.exp_avg" not in reader.read_metadata().state_dict_metadata
    )  # metadata read without a load
    found = load(root, wanted, "latest")
    assert torch.equal(found["optim"]["state"]["weight"]["exp_avg"], state(3)["optim"]["state"]["weight"]["exp_avg"])
    check_weights(found, 3)


def test_a_manager_keeps_full_checkpoints(root: Path) -> None:
    """The manager's policy drops the optimizer of older checkpoints. `restore` gives the newest full one, and an older
    one gives its model.
    """
    manager = CheckpointManager(root, copies=1, expect_partial=True, retention=Retention(keep_last=4, full_last=2))
    for step in range(1, 5):
        manager.save(step, state(step))
    store = LocalStore(root)
    wait_for(lambda: _full(store) == [3, 4], 30, "two full checkpoints")
    found = state(7)
    assert manager.restore(found) == 4
    assert found["optim"]["param_groups"][0]["lr"] == pytest.approx(0.4)
    with pytest.raises((CheckpointException, OptimizerDropped)) as failed:
        manager.restore(state(7), 2)
    error = failed.value if isinstance(failed.value, OptimizerDropped) else error_of(failed.value)
    assert isinstance(error, OptimizerDropped)
    assert error.newest_full == "step-4"
    for step in (1, 2):
        found = {name: value for name, value in state(7).items() if name != "optim"}
        assert manager.restore(found, step) == step
        check_weights(found, step)
    assert manager.all_steps() == (1, 2, 3, 4)
    assert main(["verify", "--root", str(root)]) == 0
    manager.close()


def _full(store: LocalStore) -> list[int]:
    return sorted(manifest.sequence for _, manifest in store.catalog.committed() if not manifest.is_slim)


def test_only_the_optimizers_names_are_refused() -> None:
    """Model and optimizer share the first part of their names: only the optimizer's names are refused."""
    entries = dict.fromkeys(("app.model.w", "step"), BytesStorageMetadata())
    left = EntriesLeft(entries, ("app.optimizer",), OptimizerDropped("step-1", ("app.optimizer",)))
    assert "app.model.w" in left
    assert "app.model.new" not in left
    assert "other" not in left
    for name in ("app.optimizer.state.w", "app.optimizer"):
        with pytest.raises(OptimizerDropped, match="step-1"):
            _ = name in left
        with pytest.raises(OptimizerDropped):
            left[name]
    again = pickle.loads(pickle.dumps(OptimizerDropped("step-1", ("app",), "step-2")))
    assert (again.checkpoint_id, again.dropped, again.newest_full) == ("step-1", ("app",), "step-2")
